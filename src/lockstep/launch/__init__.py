"""From a command to the processes of a run. Free of torch."""

from lockstep.launch.cli import main
from lockstep.launch.local import job
from lockstep.machine.world import World

__all__ = ["World", "job", "main"]
