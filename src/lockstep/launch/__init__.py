"""From a command to the processes of a run. Free of torch."""

from lockstep.config.settings import Settings
from lockstep.launch.cli import main
from lockstep.launch.local import Training, job

__all__ = ["Settings", "Training", "job", "main"]
