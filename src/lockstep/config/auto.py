"""Resolves `auto` for this machine: once, in the process that reads the command line, and writes it into the run's config.

So a resumed run and its evaluation compute as the run began. Processes that decide separately, such as torchrun's, must agree
(callbacks/plan.py).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omegaconf import DictConfig, open_dict

from lockstep.machine.hardware import memory_bytes, multiplies_bf16, multiplies_fp16
from lockstep.machine.world import World, cores

if TYPE_CHECKING:
    from lockstep.data.dataset import DataSet

MOST_WORKERS = 8  # per process


def precision(accelerator: str, possible: Sequence[str] | None) -> str:
    """The fastest mixed precision that the hardware has units for. `possible` under the strategy; None: all."""
    if multiplies_bf16(accelerator):
        return "bf16-mixed"
    return "16-mixed" if multiplies_fp16(accelerator) and "16-mixed" in (possible or ["16-mixed"]) else "32-true"


def workers(bytes_in_memory: int | None, world: World) -> int:
    """0 if the data fits into memory; otherwise this process's cores minus the one that trains."""
    if bytes_in_memory is not None and bytes_in_memory < memory_bytes() / 2:
        return 0
    return max(1, min(MOST_WORKERS, cores() // (world.size // world.nodes) - 1))


def decided(cfg: DictConfig, world: World, data: "DataSet | None") -> DictConfig:
    """`cfg` with a value for each `auto` that depends on the machine. `data` is None for a LightningDataModule."""
    cfg = cfg.copy()
    with open_dict(cfg):
        if cfg.trainer.precision == "auto":
            cfg.trainer.precision = precision(world.accelerator, cfg.strategy.traits.precisions)
        if data is not None and cfg.data.get("num_workers") == "auto":
            on_device = cfg.data.get("on_device") is True
            cfg.data.num_workers = 0 if on_device else workers(data.bytes_in_memory, world)
    return cfg
