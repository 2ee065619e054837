"""How a global batch is divided into micro-batches. Free of torch."""

from typing import Any

from omegaconf import DictConfig

from lockstep.config.checks import accumulated
from lockstep.config.instantiate import has_own_loaders
from lockstep.machine.world import World


def accumulations(batch: int, world: int) -> list[int]:
    """Into how many micro-batches for each of `world` processes a global batch can be divided, the fewest first."""
    return [count for count in range(1, batch // world + 1) if batch % (world * count) == 0]


def batches(cfg: DictConfig, world: World) -> dict[str, Any]:
    """For the report: the global batch, and what is made of it; None where dataloaders of one's own decide."""
    accumulate = accumulated(cfg)
    if has_own_loaders(cfg):
        return {"batch_size": None, "accumulate_grad_batches": accumulate, "micro_batch": None}
    batch = int(cfg.data.batch_size)
    micro_batch = batch // (world.size * accumulate)  # of a process
    return {"batch_size": batch, "accumulate_grad_batches": accumulate, "micro_batch": micro_batch}
