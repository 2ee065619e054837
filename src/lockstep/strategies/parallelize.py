"""What is done to a network before training, in the order that it must have."""

import logging
from collections.abc import Callable

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lockstep.strategies.batch_norm import synchronise

log = logging.getLogger(__name__)


def parallelize(
    net: nn.Module, trainer: pl.Trainer, *, sync_batchnorm: bool, channels_last: bool, compile: bool
) -> Callable[[Tensor], Tensor]:
    """Changes `net` in place, keys of its state unchanged, and returns what to call for a batch."""
    strategy = trainer.strategy
    if channels_last:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if sync_batchnorm and not synchronise(net, strategy.root_device.type):  # before sharding: it replaces modules
        log.warning("trainer.sync_batchnorm=true has nothing to act on: this network has no batch normalisation")
    if compile:  # before sharding and DDP, so that their hooks stay outside of the compiled graphs
        net.compile()  # in place: a wrapper would put `_orig_mod.` in front of every key
    shard_or_replicate = getattr(strategy, "parallelize", None)  # fsdp and dp have one
    return shard_or_replicate(net) if shard_or_replicate else net
