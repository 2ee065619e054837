"""Parallelism strategies. Networks and tasks do not depend on them."""

from lockstep.strategies.base import change_in_place, prepare
from lockstep.strategies.fsdp import FSDP2
from lockstep.strategies.replicas import DDP, DataParallel, SingleDevice

__all__ = ["DDP", "FSDP2", "DataParallel", "SingleDevice", "change_in_place", "prepare"]
