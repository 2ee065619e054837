"""Checkpoints: what they hold, how they are written and found, and how a run resumes from one."""
