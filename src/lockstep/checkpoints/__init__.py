"""Checkpoints: their content, how they are written and found, and how a run resumes from one."""
