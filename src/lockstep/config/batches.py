"""How a global batch is divided among processes and into micro-batches, and whether it can be. Free of torch."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from lockstep import ROOT, WHEEL
from lockstep.config import project
from lockstep.config.identity import model_title, title
from lockstep.config.instantiate import has_own_loaders, mixing
from lockstep.config.targets import is_shipped
from lockstep.machine.world import World
from lockstep.run.report import provenance

# --- Whether batches divide among processes and accumulated micro-batches. Free of torch ---


def accumulated(cfg: DictConfig) -> int:
    """`trainer.accumulate_grad_batches` as a number; 1 for `auto`, which starts with it."""
    given: int | str = cfg.trainer.accumulate_grad_batches
    return 1 if given == "auto" else int(given)


def parts_of_step(cfg: DictConfig, processes: int) -> int:
    """How many micro-batches each process computes for a step."""
    shards: int | None = cfg.exact.shards
    return shards // processes if shards else accumulated(cfg)


def repeats(cfg: DictConfig) -> int:
    """How many copies of each sample a batch has."""
    return int(cfg.data.get("repeats", 1))


def unit(cfg: DictConfig, *, shipped_only: bool = False) -> tuple[int, str]:
    """A micro-batch has a multiple of so many samples, and why: copies and partners are made within it."""
    pairs = mixing(cfg, shipped_only=shipped_only)
    copies = [f"data.repeats={repeats(cfg)} copies each sample"] if repeats(cfg) > 1 else []
    reasons = [*copies, *(f"augment.{name} mixes pairs" for name in pairs)]
    return repeats(cfg) * (2 if pairs else 1), " and ".join(reasons)


def batch_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    """Checks shipped data and operations only; config/classes.py checks others, once their classes are imported."""
    if is_shipped(cfg.data):
        yield from division_problems(cfg, world, shipped_only=True)


def division_problems(cfg: DictConfig, world: World, *, shipped_only: bool = False) -> Iterator[str]:
    """The global batch must divide into processes x micro-batches; evaluation batches need not."""
    batch, accumulate = cfg.data.batch_size, accumulated(cfg)
    whole, why = unit(cfg, shipped_only=shipped_only)
    shards = cfg.exact.shards
    parts = (shards or world.size * accumulate) * whole
    if batch % parts:
        low, high = batch // parts * parts, (batch // parts + 1) * parts
        choice = f"{low} or {high}" if low else str(high)
        into = f"{world.size} processes x {accumulate} accumulated micro-batches"
        into = f"{shards} logical ranks (exact.shards)" if shards else into
        cannot = f"cannot be divided among {into}"
        if whole > 1:
            cannot = f"cannot be divided among {into} of a multiple of {whole} samples ({why} within a micro-batch)"
        yield (
            f"data.batch_size={batch} is the global batch; it {cannot}. "
            f"Type data.batch_size={choice}, or change {'exact.shards' if shards else 'trainer.devices or trainer.accumulate_grad_batches'}."
        )


def division_of_whole_batch(cfg: DictConfig) -> Iterator[str]:
    """What divides the global batch of a task that compares its samples (`Task.between_samples`)."""
    why = f"task={title(cfg.task)} compares the samples of a batch (between_samples)"
    given = cfg.trainer.accumulate_grad_batches
    if cfg.exact.shards:
        yield f"exact.shards={cfg.exact.shards} divides the global batch into logical ranks, but {why}. Leave it out."
    elif given != 1:
        yield (
            f"trainer.accumulate_grad_batches={given} divides the global batch into micro-batches, but {why}. "
            "Type trainer.accumulate_grad_batches=1; if memory runs out, use more processes or a smaller data.batch_size."
        )


def auto_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    """Limits of trainer.accumulate_grad_batches=auto, which restarts the processes."""
    auto = "trainer.accumulate_grad_batches=auto"
    if cfg.trainer.accumulate_grad_batches != "auto":
        return
    if world.external or world.nodes > 1:
        who = world.external or "more than one parent process"
        yield (
            f"{auto} restarts the processes when memory runs out, but {who} started them. Type trainer.accumulate_grad_batches=1: "
            "if a micro-batch does not fit, the error names a number that does."
        )
    for key in ("limit_train_batches", "val_check_interval"):
        if cfg.trainer[key] and (isinstance(cfg.trainer[key], int) or key == "limit_train_batches"):
            yield (
                f"trainer.{key}={cfg.trainer[key]} counts micro-batches; with {auto} their number per step is not known yet. "
                "Type trainer.accumulate_grad_batches=1, or a larger number."
            )


def fold_problems(cfg: DictConfig, _: World) -> Iterator[str]:
    folds, fold = cfg.data.get("folds"), cfg.data.get("fold", 0)
    if folds is None and fold:
        yield f"data.fold={fold} has no effect without data.folds. Type data.folds=5 as well."
    if folds is not None and fold >= folds:
        yield f"data.fold={fold} is not possible with data.folds={folds}; folds are counted from 0 to {folds - 1}."


# --- How a global batch is divided into micro-batches. Free of torch ---


def accumulations(batch: int, world: int, unit: int = 1) -> list[int]:
    """The possible numbers of micro-batches per process and step, smallest first. Each has a multiple of `unit` samples."""
    return [count for count in range(1, batch // world + 1) if batch % (world * count * unit) == 0]


def batches(cfg: DictConfig, world: World) -> dict[str, Any]:
    """For the report: the global batch and how it is divided; None for the user's own dataloaders."""
    accumulate = parts_of_step(cfg, world.size)
    if has_own_loaders(cfg):
        return {"batch_size": None, "accumulate_grad_batches": accumulate, "micro_batch": None}
    batch = int(cfg.data.batch_size)
    micro_batch = batch // (world.size * accumulate)  # per process
    return {"batch_size": batch, "accumulate_grad_batches": accumulate, "micro_batch": micro_batch}


def first_report(cfg: DictConfig, world: World) -> dict[str, Any]:
    """What report.json says from a run's first second."""
    return {
        "run": cfg.run,
        "task": title(cfg.task),
        "model": model_title(cfg),
        "strategy": cfg.strategy.name,
        "world_size": world.size,
        "accelerator": world.accelerator,
        "devices": world.devices,
        "nodes": world.nodes,
        "precision": str(cfg.trainer.precision),
        **batches(cfg, world),
        "seed": cfg.seed,
        "monitor": cfg.checkpoint.monitor,
        "monitor_mode": cfg.checkpoint.mode,
        "data/name": title(cfg.data),
        "resumed_from": cfg.resume,
        "restarts": 0,
        **provenance(project.current().root or (None if WHEEL else ROOT)),
    }
