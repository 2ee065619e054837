"""What runs the training: devices, processes, signals. Free of torch."""
