"""How a command becomes processes: identity, torchrun, SLURM, sweeps. Nothing here imports torch."""

from lockstep.launch.cli import main
from lockstep.launch.jobs import job
from lockstep.machine.world import World

__all__ = ["World", "job", "main"]
