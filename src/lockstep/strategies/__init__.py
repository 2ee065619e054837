"""How replicas of the network work together, one file for each strategy. The network and the task know nothing of them."""

from lockstep.strategies.ddp import Replicated
from lockstep.strategies.dp import DataParallel
from lockstep.strategies.fsdp import FullySharded
from lockstep.strategies.parallelize import parallelize
from lockstep.strategies.single import Single

__all__ = ["DataParallel", "FullySharded", "Replicated", "Single", "parallelize"]
