"""How a global batch is divided among processes and into micro-batches, and whether it can be. Free of torch."""

from typing import Any

from omegaconf import DictConfig

from lockstep import ROOT, WHEEL
from lockstep.config import project
from lockstep.config.identity import model_title, title
from lockstep.config.instantiate import has_own_loaders, mixing
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
