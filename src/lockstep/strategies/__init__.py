"""How replicas of the network work together. Networks and tasks do not know about strategies."""

from lockstep.strategies.base import change_in_place, parallelize, parallelize_module
from lockstep.strategies.fsdp import FSDP2
from lockstep.strategies.replicas import DDP, DataParallel, SingleDevice

__all__ = ["DDP", "FSDP2", "DataParallel", "SingleDevice", "change_in_place", "parallelize", "parallelize_module"]
