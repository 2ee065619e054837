"""Where the time of training goes, as time/* in the report. Nothing is measured within a batch."""

import math
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lockstep.callbacks.throughput import waited_s


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
        waited = 0.0 if math.isnan(waited) else waited
        parts = {"wait": waited, "validation": self.validated_s, "saving": saved}
        parts["steps"] = max(0.0, self.trained_s - sum(parts.values()))
        return {f"time/{name}_s": seconds for name, seconds in parts.items()}
