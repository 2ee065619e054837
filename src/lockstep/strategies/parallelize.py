"""The changes to a network before training. Their order matters."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.strategies.batch_norm import synchronise

GRAPHS = 8  # of a compiled part: training, evaluation, last batches of other sizes; torch's own limit for one


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
        blocks: list[nn.Module] = getattr(strategy, "blocks_of", lambda _: [])(net)  # of fsdp
        compile_in_place(blocks or [net])
    shard_or_replicate = getattr(strategy, "parallelize", None)  # fsdp and dp have one
    return shard_or_replicate(net) if shard_or_replicate else net


def compile_in_place(parts: list[nn.Module]) -> None:
    """A wrapper would prefix every key with `_orig_mod.`.

    Blocks of a class share torch's cache of compiled graphs, and equal ones share their graphs. The 16 of resnet50d, in training and
    in evaluation, need more than eight, after which torch gives up by default.
    """
    config: Any = torch.compiler.config
    config.recompile_limit = max(config.recompile_limit, GRAPHS * len(parts))
    for part in parts:
        part.compile()
