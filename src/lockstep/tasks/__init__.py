"""What networks are trained to do. One file a task; the loss stands nowhere else."""

from lockstep.tasks.classification import Classification
from lockstep.tasks.task import Task

__all__ = ["Classification", "Task"]
