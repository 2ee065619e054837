"""Commands and the processes of a run. Free of torch."""

from lockstep.config.settings import Settings
from lockstep.launch.cli import main
from lockstep.launch.local import Job, data, job

__all__ = ["Job", "Settings", "data", "job", "main"]
