"""What cannot have the same bits on any number of processes (`exact.shards`). Free of torch."""

from collections.abc import Iterator

from omegaconf import DictConfig

from lockstep.config.admitted import is_shipped
from lockstep.config.identity import title
from lockstep.config.words import shown
from lockstep.machine.world import World

# Keys that only torch's DistributedDataParallel and all-reduce read, and their usual values.
OF_DDP = {"bucket_cap_mb": 25, "gradient_as_bucket_view": True, "static_graph": False, "find_unused_parameters": False}
COUNTED = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "val_check_interval")  # in batches
HALF = ("bf16-true", "16-true")


def process_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    """Of training and evaluation: where figures would depend on the processes."""
    if (shards := cfg.exact.shards) is None:
        return
    exact = f"exact.shards={shards}"
    if shards % world.size:
        yield (
            f"{exact} cannot be divided among {world.size} processes. Start 1, 2, 4 or another power of two up to {shards}. A run keeps its "
            "exact.shards; an evaluation with exact.shards=null has figures that are equal to rounding."
        )
    if not is_shipped(cfg.strategy):
        yield f"{exact} needs strategy=single, ddp or fsdp: strategy={title(cfg.strategy)} adds gradients in an order of its own."
    if cfg.strategy.traits.splits_batches:
        yield f"{exact} is not possible with strategy={world.strategy}, which divides batches by the number of GPUs. Type strategy=ddp."
    if world.accelerator == "mps":
        yield f"{exact} needs float64, which mps does not support. Type trainer.accelerator=cpu."
    if world.accelerator == "cuda" and cfg.trainer.deterministic in (False, "warn"):
        yield f"{exact} needs deterministic kernels on GPUs. Leave trainer.deterministic={shown(cfg.trainer.deterministic)} out."
    if world.accelerator == "cuda" and cfg.trainer.benchmark:
        yield f"trainer.benchmark=true chooses kernels by their speed in this run, so {exact} is not possible. Leave trainer.benchmark out."
    if world.accelerator != "cpu" and cfg.exact.threads != 1:
        yield f"exact.threads={cfg.exact.threads} has no effect on {world.accelerator}: it is for CPUs. Leave it out."
    if cfg.compile:
        yield f"compile=true computes differently under each strategy, so {exact} is not possible. Leave one of them out."
    if cfg.tf32:
        yield f"tf32=true computes differently on each kind of GPU, so {exact} is not possible. Leave one of them out."


def exact_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    """Of training."""
    if (shards := cfg.exact.shards) is None:
        for key, usual in (("threads", 1), ("digests", False)):
            if cfg.exact[key] != usual:
                yield f"exact.{key}={shown(cfg.exact[key])} has no effect without exact.shards. Type exact.shards=8 as well, or leave it out."
        return
    exact, trainer, strategy = f"exact.shards={shards}", cfg.trainer, cfg.strategy
    yield from process_problems(cfg, world)
    if trainer.accumulate_grad_batches != 1:
        yield (
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} has no effect with {exact}, which divides the batch. Leave it "
            "out; for smaller micro-batches type a larger exact.shards."
        )
    for key in COUNTED:
        if isinstance(trainer[key], float) and trainer[key] not in (0.0, 1.0):
            yield f"trainer.{key}={trainer[key]} is a share of a process's micro-batches; with {exact} it takes a number of steps. Type trainer.{key}=10."
    if trainer.sync_batchnorm:
        yield f"trainer.sync_batchnorm=true has no place with {exact}: each logical rank normalises its own samples. Leave it out."
    if strategy.get("comm_hook"):
        yield f"strategy.comm_hook={strategy.comm_hook} rounds sums of processes, so {exact} is not possible. Leave one of them out."
    if strategy.get("reduce_each_micro_batch"):
        yield f"strategy.reduce_each_micro_batch=true has no effect with {exact}, which does so anyway. Leave it out."
    for key, usual in OF_DDP.items():
        if strategy.get(key, usual) != usual:
            yield f"strategy.{key}={shown(strategy[key])} has no effect with {exact}, which adds gradients itself. Leave it out."
    if strategy.traits.shards and trainer.precision in HALF:
        yield f"trainer.precision={trainer.precision} rounds the last elements of a shard in another way, so {exact} is not possible with strategy={world.strategy}. Type trainer.precision=bf16-mixed."
