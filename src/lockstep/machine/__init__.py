"""Devices, processes, signals and files. Free of torch."""
