"""The changes to a network before training. Their order matters."""

from collections.abc import Callable

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.strategies.batch_norm import synchronise


def parallelize(
    net: nn.Module, trainer: pl.Trainer, *, sync_batchnorm: bool, channels_last: bool, compile: bool
) -> Callable[[Tensor], Tensor]:
    """Changes `net` in place, keeps its state keys, and returns the callable for a batch."""
    strategy = trainer.strategy
    if channels_last:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if sync_batchnorm and not synchronise(net, strategy.root_device.type):  # before sharding: it replaces modules
        raise UserError(
            "trainer.sync_batchnorm=true has no effect: this network has no batch normalisation. Leave it out."
        )
    if compile:  # before sharding and DDP: their hooks stay outside the compiled graphs
        net.compile()  # in place: a wrapper would prefix every key with `_orig_mod.`
    shard_or_replicate = getattr(strategy, "parallelize", None)  # fsdp and dp have one
    return shard_or_replicate(net) if shard_or_replicate else net
