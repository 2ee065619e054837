"""Where the time of training goes, and how fast it is. Nothing is measured within a batch."""

import math
import time
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size

from lockstep.machine.hardware import peak_bytes
from lockstep.training.steps import completes_step, has_row, steps_done

# --- Where the time of training goes, as time/* in the report ---


class Clock(Callback):
    """Seconds of this process: waiting for data, validation, saving, and steps, which are the rest of training."""

    def __init__(self) -> None:
        self.trained_s = self.validated_s = self.began_s = self.validation_began_s = 0.0
        self.trainer: Trainer | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trainer, self.began_s, self.validated_s = trainer, time.perf_counter(), 0.0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validation_began_s = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated_s += time.perf_counter() - self.validation_began_s

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trained_s = time.perf_counter() - self.began_s

    def report_figures(self) -> dict[str, Any]:
        if self.trainer is None:
            return {}
        waited, saved = waited_s(self.trainer), getattr(self.trainer.strategy.checkpoint_io, "stalled_s", 0.0)
        parts = {"wait": 0.0 if math.isnan(waited) else waited, "validation": self.validated_s, "saving": saved}
        parts["steps"] = max(0.0, self.trained_s - sum(parts.values()))
        return {f"time/{name}_s": seconds for name, seconds in parts.items()}


# --- Training speed over all processes and the fraction of time spent waiting for data, both without validation; memory ---


def waited_s(trainer: Trainer) -> float:
    """NaN if the user's own dataloaders do not measure it."""
    return float(getattr(trainer.datamodule, "waited_s", math.nan))  # type: ignore[attr-defined]


def unit_of(trainer: Trainer) -> str:
    return str(getattr(trainer.datamodule, "unit", "samples"))  # type: ignore[attr-defined]


def finish(trainer: Trainer) -> None:
    """Waits for what the GPU has yet to compute: the clock is the CPU's."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()


def size_of(batch: Any) -> int:
    """Number of samples: `count` for Lockstep's batches, else the first dimension, else 0."""
    if isinstance(batch, dict) and "count" in batch:
        return int(batch["count"])
    try:
        return int(extract_batch_size(batch))
    except MisconfigurationException:
        return 0


class Throughput(Callback):
    """Measures windows of `log_every_n_steps` steps. The first window includes warm-up and compiling; it counts only if there
    is no other."""

    def __init__(self) -> None:
        self.unit = "samples"
        self.windows: list[tuple[int, float, float]] = []  # samples, seconds, seconds spent waiting for data
        self.waited_s = 0.0
        self.first_step_s: float | None = None  # includes compiling
        self.samples = 0
        self.began_s: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.unit = unit_of(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.began_s is None:
            self.began_s, self.waited_s = time.perf_counter(), waited_s(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.samples += size_of(batch) * trainer.world_size
        if self.first_step_s is None and self.began_s is not None:
            finish(trainer)  # SYNC: once a run
            self.first_step_s = time.perf_counter() - self.began_s
        if completes_step(trainer, batch_idx) and has_row(trainer, steps_done(trainer)):
            self.close(trainer)
            self.began_s = time.perf_counter()  # includes the wait for the next batch
            for samples, seconds, _ in self.windows[-1:]:
                pl_module.log(f"train/{self.unit}_per_s", samples / seconds, prog_bar=True)
                if (peak := peak_bytes(trainer.strategy.root_device)) is not None:
                    pl_module.log("train/peak_memory_gib", peak / 2**30)

    def close(self, trainer: Trainer) -> None:
        if self.began_s is not None and self.samples:
            finish(trainer)  # SYNC: once every log_every_n_steps
            waited = waited_s(trainer)
            self.windows.append((self.samples, time.perf_counter() - self.began_s, waited - self.waited_s))
            self.waited_s = waited
        self.samples, self.began_s = 0, None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close(trainer)

    def report_figures(self) -> dict[str, float | None]:
        """Of the whole run."""
        windows = self.windows[1:] or self.windows or [(0, 0, 0)]
        samples, seconds, waited = (sum(column) for column in zip(*windows, strict=True))
        return {
            f"train/{self.unit}_per_s": samples / seconds if seconds else None,
            "train/data_wait_share": waited / seconds if seconds and not math.isnan(waited) else None,
            "train/first_step_s": self.first_step_s,
        }
