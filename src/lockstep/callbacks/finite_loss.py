"""Stops a run whose loss is no longer a number."""

import math
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lockstep.errors import TrainingFailed
from lockstep.training.steps import completes_step, has_row, steps_done


class FiniteLoss(pl.Callback):
    """Checks the loss whenever it is logged, and at the end, so it adds no synchronisation to the training loop."""

    def __init__(self) -> None:
        self.loss: Tensor | None = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else None  # manual optimization may return anything
        self.loss = loss if isinstance(loss, Tensor) else None
        if completes_step(trainer, batch_idx) and has_row(trainer, steps_done(trainer)):
            self.look(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.look(trainer)

    def look(self, trainer: pl.Trainer) -> None:
        loss = 0.0 if self.loss is None else self.loss.item()  # SYNC: once every log_every_n_steps
        if not math.isfinite(loss):
            raise TrainingFailed(
                f"the loss is {loss} at step {steps_done(trainer)} (epoch {trainer.current_epoch}). "
                "Try a lower optim.lr, trainer.gradient_clip_val=1.0, or trainer.detect_anomaly=true to find the operation that produces it."
            )
