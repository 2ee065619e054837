"""What cannot have the same bits on any number of processes (`exact.shards`). Free of torch."""

from collections.abc import Iterator

from omegaconf import DictConfig

from lockstep.config.components import is_shipped
from lockstep.config.identity import title
from lockstep.machine.world import World


def division_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    """Of training and evaluation: each process computes as many logical ranks as the others."""
    shards = cfg.exact.shards
    if shards and (world.size > shards or shards % world.size):
        yield (
            f"exact.shards={shards} cannot be divided among {world.size} processes. Start 1, 2, 4 or another power of two up to "
            f"{shards}; exact.shards itself belongs to a run's bits."
        )
    if shards and not is_shipped(cfg.strategy):
        yield f"exact.shards={shards} needs strategy=single, ddp or fsdp: strategy={title(cfg.strategy)} adds gradients in an order of its own."
    if shards and cfg.strategy.traits.splits_batches:
        yield f"exact.shards={shards} is not possible with strategy={world.strategy}, which divides batches by the number of GPUs. Type strategy=ddp."
    if shards and world.accelerator == "mps":
        yield f"exact.shards={shards} needs float64, which mps has not. Type trainer.accelerator=cpu."
    if shards and world.accelerator == "cuda" and cfg.trainer.deterministic is not True:
        yield f"exact.shards={shards} needs deterministic kernels on GPUs. Type trainer.deterministic=true as well."
    for key, value in (("compile", cfg.compile), ("tf32", cfg.tf32)):
        if shards and value:
            yield f"{key}=true is not possible with exact.shards={shards}: what is computed differs between strategies and machines. Leave one out."


def exact_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    """Of training."""
    shards, trainer = cfg.exact.shards, cfg.trainer
    if not shards:
        for key, usual in (("threads", 1), ("digests", False)):
            if cfg.exact[key] != usual:
                yield f"exact.{key}={str(cfg.exact[key]).lower()} has no effect without exact.shards. Type exact.shards=8 as well, or leave it out."
        return
    yield from division_problems(cfg, world)
    if trainer.accumulate_grad_batches != 1:
        yield (
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} has no effect with exact.shards={shards}, which divides "
            "the batch. Leave it out; for smaller micro-batches type a larger exact.shards."
        )
    if trainer.sync_batchnorm:
        yield (
            f"trainer.sync_batchnorm=true contradicts exact.shards={shards}: each logical rank has batch statistics of its own, whatever "
            "the number of processes. Leave it out."
        )
    if cfg.strategy.get("comm_hook"):
        yield f"strategy.comm_hook={cfg.strategy.comm_hook} rounds sums of processes, so exact.shards={shards} is not possible. Leave one of them out."
    if cfg.strategy.get("reduce_each_micro_batch"):
        yield f"strategy.reduce_each_micro_batch=true has no effect with exact.shards={shards}, which does so anyway. Leave it out."
