"""How replicas of the network work together: one file per strategy. Networks and tasks do not know about strategies."""

from lockstep.strategies.base import parallelize
from lockstep.strategies.ddp import Replicated
from lockstep.strategies.dp import DataParallel
from lockstep.strategies.fsdp import FullySharded
from lockstep.strategies.single import Single

__all__ = ["DataParallel", "FullySharded", "Replicated", "Single", "parallelize"]
