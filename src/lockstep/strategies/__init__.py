"""How replicas of the network work together: one file per strategy. Networks and tasks do not know about strategies."""

from lockstep.strategies.ddp import ddp
from lockstep.strategies.dp import dp
from lockstep.strategies.fsdp import fsdp
from lockstep.strategies.parallelize import parallelize
from lockstep.strategies.single import single

__all__ = ["ddp", "dp", "fsdp", "parallelize", "single"]
