"""What is done to a network before training, in the order that it must have."""

from collections.abc import Callable

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.strategies.batch_norm import synchronise


def parallelize(
    net: nn.Module, trainer: pl.Trainer, *, sync_batchnorm: bool, channels_last: bool, compile: bool
) -> Callable[[Tensor], Tensor]:
    """Changes `net` in place, keys of its state unchanged, and returns what to call for a batch."""
    strategy = trainer.strategy
    if channels_last:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if sync_batchnorm and not synchronise(net, strategy.root_device.type):  # before sharding: it replaces modules
        raise UserError(
            "trainer.sync_batchnorm=true has no effect: this network has no batch normalisation. Leave it out."
        )
    if compile:  # before sharding and DDP, so that their hooks stay outside of the compiled graphs
        net.compile()  # in place: a wrapper would put `_orig_mod.` in front of every key
    shard_or_replicate = getattr(strategy, "parallelize", None)  # fsdp and dp have one
    return shard_or_replicate(net) if shard_or_replicate else net
