"""From a command to the processes of a run. Free of torch."""

from lockstep.launch.cli import main
from lockstep.launch.jobs import job
from lockstep.machine.world import World

__all__ = ["World", "job", "main"]
