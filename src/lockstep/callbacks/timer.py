"""Ends a run at trainer.max_time."""

import time
from typing import Any

import lightning.pytorch as pl

from lockstep.training.steps import completes_step, steps_done

LOOK_S = 1.0  # seconds between the questions to rank 0


class Timer(pl.callbacks.Timer):
    """Lightning's asks rank 0 after each micro-batch, by a broadcast that each GPU waits for; this one about once a second."""

    looked_at = (0, 0.0)  # steps, seconds
    next_look = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.looked_at, self.next_look = (steps_done(trainer), time.monotonic()), 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, now_s = steps_done(trainer), time.monotonic()
        if not completes_step(trainer, batch_idx) or step < self.next_look:
            return
        since, began_s = self.looked_at
        self.looked_at = step, now_s
        left_s, step_s = self.time_remaining(), (now_s - began_s) / max(1, step - since)
        look = round(max(0.0, min(LOOK_S, left_s or 0.0)) / max(step_s, 1e-6))
        over, self.next_look = trainer.strategy.broadcast(((left_s or 0.0) <= 0, step + max(1, look)))
        if over:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)  # once more, for its message
