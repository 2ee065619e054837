"""How replicas of the network work together. Networks and tasks do not know about strategies."""

from lockstep.strategies.base import DataParallel, SingleDevice, change_in_place, parallelize, parallelize_module
from lockstep.strategies.ddp import DDP
from lockstep.strategies.fsdp import FSDP2

__all__ = ["DDP", "FSDP2", "DataParallel", "SingleDevice", "change_in_place", "parallelize", "parallelize_module"]
