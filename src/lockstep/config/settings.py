"""The settings of a run: its config and the values derived from it, decided before any process starts. Free of torch.

A resumed run and its evaluation keep the settings that the run began with. Processes that decide separately, such as
those of torchrun, must agree (callbacks/summary.py).
"""

import math
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.draft import name_prefix, timestamp
from lockstep.config.formatting import to_text
from lockstep.config.instantiate import has_base, operations, pretraining
from lockstep.config.run_config import Loader, Request, RunConfig
from lockstep.config.schema import OPTIONAL
from lockstep.machine.system import cores, memory_bytes
from lockstep.machine.world import StrategySpec, World, fastest_precision, spec_of, world_of
from lockstep.run import RunFolder

if TYPE_CHECKING:
    from lockstep.data.dataset import DataSet

# Keys of `data` that accept `model`: the value of the network's pretraining.
OF_NETWORK = ("mean", "std", "resize", "crop_pct", "interpolation")

# Defaults of keys that other keys exclude, unless they are false or null.
DEFAULTS = {
    "trainer.accumulate_grad_batches": 1,
    "exact.threads": 1,
    "checkpoint.background": True,
    "strategy.bucket_cap_mb": 25,
    "strategy.gradient_as_bucket_view": True,
}

# --- The values of `auto` for this run and machine ---

MOST_WORKERS = 8  # per process
ROWS, SPARSEST = 20, 50  # rows of the log: at least 20 in a run, at least one every 50 steps


def workers(bytes_in_memory: int | None, world: World) -> int:
    """0 if the data fits into memory; otherwise this process's CPU cores minus the one that trains."""
    if bytes_in_memory is not None and bytes_in_memory < memory_bytes() / 2:
        return 0
    return max(1, min(MOST_WORKERS, cores() // (world.size // world.nodes) - 1))


def log_interval(steps: float) -> int:
    """The optimizer steps between two rows of the log, in a run of `steps` steps, which may be infinite."""
    return int(min(SPARSEST, max(1.0, steps / ROWS)))


# --- The settings ---


@dataclass(frozen=True)
class Settings:
    """The config of a run, its processes, and the values derived from both."""

    cfg: RunConfig
    world: World
    request: Request | None = None  # of predict.py
    overrides: tuple[str, ...] | None = ()  # of the commands that started and resumed the run; None: unknown
    built_groups: set[str] = field(default_factory=set, compare=False)  # groups whose objects this process has built
    # what the module was made for: `network` (num_classes, ...) and `metadata`. Checkpoints have it: predictions and exports need no data
    made_for: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, cfg: RunConfig, env: Mapping[str, str] = os.environ) -> "Settings":
        strategy, trainer = cfg.strategy, cfg.trainer
        world = world_of(strategy.target, strategy.name, trainer.accelerator, trainer.devices, trainer.num_nodes, env)
        return cls(cfg, world)

    def replace(self, values: Mapping[str, Any]) -> "Settings":
        """A copy with new values of dotted keys."""
        return replace(self, cfg=self.cfg.replace(values))

    # --- Names and paths ---

    @property
    def model_title(self) -> str:
        """The display name of the model, or of a task that creates its own network."""
        return (self.cfg.model or self.cfg.task).title

    def network_title(self, module: Any) -> str:
        """The display name of the network of a built module, or of a module that was made by hand."""
        if "task" not in self.built_groups:
            return type(module).__name__
        by_hand = self.cfg.model and "model" not in self.built_groups
        return type(getattr(module, "net", module)).__name__ if by_hand else self.model_title

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.cfg.runs_dir) / str(self.cfg.run))

    @property
    def seed(self) -> int:
        assert self.cfg.seed is not None  # set by with_run_identity
        return self.cfg.seed

    @property
    def tested_checkpoint(self) -> str:
        """The checkpoint that an evaluation tests."""
        assert self.cfg.init_from
        return self.cfg.init_from

    @property
    def resume(self) -> str | None:
        """The checkpoint that training continues."""
        return self.cfg.resume

    @property
    def weights(self) -> str | None:
        """The checkpoint with the initial weights of a new module."""
        return None if self.cfg.resume else self.cfg.init_from

    def as_built(self) -> "Settings":
        """A copy without those of the config's network, optimizer and schedule that train.py built itself."""
        by_hand = [group for group in OPTIONAL if getattr(self.cfg, group) and group not in self.built_groups]
        return self.replace({group: {} for group in by_hand}) if by_hand else self

    def evaluation_file(self, job: str = "eval") -> Path:
        """Where eval.py and predict.py write: the run's <job>.json, or a file next to a checkpoint outside of a run."""
        folder = self.folder.path
        return folder / f"{job}.json" if folder.is_dir() else Path(self.tested_checkpoint).with_suffix(f".{job}.json")

    # --- Classes ---

    @cached_property
    def spec(self) -> StrategySpec:
        return spec_of(self.cfg.strategy.target)

    @cached_property
    def own_loaders(self) -> bool:
        """Whether `data` is a LightningDataModule, which has its own dataloaders."""
        return has_base(self.cfg.data, "data", "lightning.pytorch.core.datamodule.LightningDataModule")

    @cached_property
    def loader(self) -> Loader | None:
        """None if the data has its own dataloaders."""
        return None if self.own_loaders else self.cfg.loader

    @cached_property
    def operations(self) -> dict[str, Any]:
        """The operations of `augment` by name. Raises UserError with all errors in their arguments."""
        return operations(self.cfg.augment, self.cfg.data.get("image_size"))

    @property
    def transforms(self) -> list[str]:
        """The transforms that run where samples are read."""
        return [name for name, operation in self.operations.items() if getattr(operation, "at_reading", True)]

    # --- Batches and steps ---

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of each step, over all processes."""
        return self.cfg.exact.logical_ranks or self.world.size * self.cfg.trainer.accumulate_grad_batches

    def epoch_batches(self, samples: int) -> int:
        """The number of micro-batches of a process in an epoch with `samples` training samples."""
        assert self.loader
        trainer = self.cfg.trainer
        limit, steps = trainer.limit_train_batches, samples // (self.loader.batch_size // self.loader.repeats)
        batches = steps * trainer.accumulate_grad_batches
        if limit is None:
            return batches
        return min(batches, limit) if isinstance(limit, int) else int(batches * limit)

    def total_steps(self, samples: int) -> float:
        """The number of optimizer steps of the run; infinite without a limit."""
        trainer, endless = self.cfg.trainer, (None, -1)
        epochs = math.inf if trainer.max_epochs in endless else trainer.max_epochs
        total: float = epochs * (self.epoch_batches(samples) // trainer.accumulate_grad_batches)
        return total if trainer.max_steps in endless else min(total, trainer.max_steps)

    @property
    def micro_batch_divisor(self) -> tuple[int, str]:
        """The divisor of every micro-batch size, and the reason: copies and mixed pairs stay within a micro-batch."""
        repeats = self.loader.repeats if self.loader else 1
        pairs = [name for name, operation in self.operations.items() if getattr(operation, "mixes", False)]
        copies = [f"loader.repeats={repeats} copies each sample"] if repeats > 1 else []
        reasons = [*copies, *(f"augment.{name} mixes pairs" for name in pairs)]
        return repeats * (2 if pairs else 1), " and ".join(reasons)

    @property
    def accumulations(self) -> list[int]:
        """The possible values of trainer.accumulate_grad_batches, smallest first."""
        unit, batch = self.world.size * self.micro_batch_divisor[0], self.loader.batch_size if self.loader else 0
        return [count for count in range(1, batch // self.world.size + 1) if batch % (count * unit) == 0]

    @property
    def batches(self) -> dict[str, Any]:
        """For the report: the global batch and how it is divided; None with custom dataloaders."""
        accumulate = self.micro_batches // self.world.size
        batch = self.loader.batch_size if self.loader else None
        return {
            "batch_size": batch,
            "accumulate_grad_batches": accumulate,
            "micro_batch": batch and batch // (self.world.size * accumulate),  # per process
        }

    # --- Messages about keys ---

    def setting_text(self, key: str) -> str:
        """A key and its value, as messages show them."""
        return f"{key}={to_text(self.cfg.get(key))}"

    def conflicts(self, reasons: Mapping[str, str]) -> Iterator[str]:
        """A message for each of these keys that does not have its default, with the reason why it must."""
        for key, reason in reasons.items():
            if self.cfg.get(key) not in (DEFAULTS.get(key, False), None):
                yield f"{self.setting_text(key)} {reason.format(exact=self.setting_text('exact.logical_ranks'))}."

    # --- Values that are decided once per run ---

    def with_run_identity(self, experiment: str | None = None) -> "Settings":
        """A copy with a run name, a seed and ids for the loggers; adds the experiment to the loggers' tags."""
        cfg, drawn = self.cfg, dict[str, Any]()
        if cfg.run is None:
            drawn["run"] = f"{name_prefix(cfg.model or cfg.task, cfg.data)}-{timestamp()}"
        if cfg.seed is None:
            drawn["seed"] = secrets.randbelow(2**31)
        for name, logger in cfg.logger.items():
            if "id" in logger and logger.get("id") is None:
                drawn[f"logger.{name}.id"] = secrets.token_hex(4)
            if experiment and "auto" in (tags := logger.get("tags") or ()) and experiment not in tags:
                drawn[f"logger.{name}.tags"] = [experiment, *tags]
        if cfg.trainer.max_steps == -1 and cfg.trainer.max_epochs is None:
            drawn["trainer.max_epochs"] = 1
        return self.replace(drawn)

    def with_auto_resolved(self, data: "DataSet | None", samples: int | None = None) -> "Settings":
        """A copy with a value for each `auto` that depends on the machine or on the number of training samples.

        `data` is None for a LightningDataModule: its length is unknown until it trains (callbacks/module_hooks.py).
        """
        cfg, values = self.cfg, dict[str, Any]()
        if cfg.trainer.precision == "auto":
            best = fastest_precision(self.world.accelerator, self.spec.precisions)
            # Lightning's default, if the module makes its own network
            values["trainer.precision"] = best if cfg.model else "32-true"
        if cfg.trainer.log_every_n_steps == "auto" and samples is not None:
            values["trainer.log_every_n_steps"] = log_interval(self.total_steps(samples))
        if (loader := self.loader) is None:
            values["loader"] = {}
        elif data is not None:
            if loader.num_workers == "auto":
                in_memory = None if self.transforms else data.evaluated.bytes_in_memory
                values["loader.num_workers"] = 0 if loader.on_device is True else workers(in_memory, self.world)
            if loader.eval_batch_size is None:
                values["loader.eval_batch_size"] = data.eval_batch_size or loader.batch_size
        if data is not None and data.source and cfg.data.get("source") == "auto":
            values["data.source"] = data.source
        return self.replace(values)

    def with_pretraining_values(self) -> "Settings":
        """A copy with numbers in place of `model` in `data`, so a newer timm cannot change a resumed run."""
        data = self.cfg.data
        if not (keys := [key for key in OF_NETWORK if data.get(key) == "model"]):
            return self
        values = pretraining(self.cfg.model, data)
        return self.replace({f"data.{key}": values[key] for key in keys})
