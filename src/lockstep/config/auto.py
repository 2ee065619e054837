"""Resolves `auto` for this run and machine: once, in the process that reads the command line, and writes it into the run's config.

So a resumed run and its evaluation compute as the run began. Processes that decide separately, such as torchrun's, must agree
(callbacks/summary.py).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omegaconf import DictConfig, open_dict

from lockstep.config.rules import total_steps
from lockstep.machine.hardware import VOLTA, capabilities, memory_bytes, multiplies_bf16
from lockstep.machine.world import World, cores, spec_of

if TYPE_CHECKING:
    from lockstep.data.dataset import DataSet

MOST_WORKERS = 8  # per process
ROWS, SPARSEST = 20, 50  # of the log: at least so many a run, and at least one in so many steps


def precision(accelerator: str, possible: Sequence[str] | None) -> str:
    """The fastest mixed precision that the hardware has units for. `possible` under the strategy; None: all."""
    if multiplies_bf16(accelerator):
        return "bf16-mixed"
    has_fp16 = accelerator == "cuda" and min(capabilities(), default=0) >= VOLTA
    return "16-mixed" if has_fp16 and "16-mixed" in (possible or ["16-mixed"]) else "32-true"


def workers(bytes_in_memory: int | None, world: World) -> int:
    """0 if the data fits into memory; otherwise this process's cores minus the one that trains."""
    if bytes_in_memory is not None and bytes_in_memory < memory_bytes() / 2:
        return 0
    return max(1, min(MOST_WORKERS, cores() // (world.size // world.nodes) - 1))


def log_interval(steps: float) -> int:
    """The optimizer steps from one row of the log to the next, in a run of so many; `steps` may be infinite."""
    return int(min(SPARSEST, max(1.0, steps / ROWS)))


def decided(cfg: DictConfig, world: World, data: "DataSet | None", samples: int | None = None) -> DictConfig:
    """`cfg` with a value for each `auto` that depends on the machine or on the number of training samples.

    `data` is None for a LightningDataModule, which knows its length only when it trains (callbacks/custom_module.py).
    """
    cfg = cfg.copy()
    with open_dict(cfg):
        if cfg.trainer.precision == "auto":
            cfg.trainer.precision = precision(world.accelerator, spec_of(cfg.strategy).precisions)
        if cfg.trainer.log_every_n_steps == "auto" and samples is not None:
            cfg.trainer.log_every_n_steps = log_interval(total_steps(cfg, samples))
        if data is not None and cfg.data.get("num_workers") == "auto":
            on_device = cfg.data.get("on_device") is True
            cfg.data.num_workers = 0 if on_device else workers(data.bytes_in_memory, world)
    return cfg
