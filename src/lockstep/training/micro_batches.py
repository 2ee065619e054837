"""How a global batch is divided into micro-batches. Free of torch."""

from typing import Any

from omegaconf import DictConfig

from lockstep.config.batches import parts_of_step
from lockstep.config.instantiate import has_own_loaders
from lockstep.machine.world import World


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
