"""Checkpoints: what is in them, how they get to the disk, and how a run goes on from one."""
