"""Stops a run whose loss is no longer a number."""

import math
from collections import deque
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lockstep.checkpoints.finding import checkpoints, step_of
from lockstep.errors import LossNotFinite
from lockstep.training.steps import completes_step, has_row, steps_done

KEPT, SHOWN = 1000, 16  # losses since the last log row; samples in the message


class FiniteLoss(Callback):
    """Checks the loss whenever it is logged, and at the end, so it adds no synchronisation to the other steps.

    All processes decide alike: one that ended alone would leave the others waiting in their next all-reduce.
    """

    def __init__(self) -> None:
        self.seen: deque[tuple[int, Tensor, Any]] = deque(maxlen=KEPT)  # step, loss, indices of the samples

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else None  # manual optimization may return anything
        complete = completes_step(trainer, batch_idx)
        if isinstance(loss, Tensor):
            indices = batch.get("index") if isinstance(batch, dict) else None
            self.seen.append((steps_done(trainer) + (not complete), loss.detach(), indices))
        if complete and has_row(trainer, steps_done(trainer)):
            self.look(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.look(trainer)

    def look(self, trainer: Trainer) -> None:
        bad = bool(self.seen) and not math.isfinite(self.seen[-1][1].item())  # SYNC: once every log_every_n_steps
        if trainer.strategy.reduce_boolean_decision(bad, all=False):
            raise LossNotFinite(self.words(trainer))
        self.seen.clear()

    def first(self) -> tuple[int, float, list[int]] | None:
        """The step, the loss and the samples of this process's first batch whose loss is no number."""
        for step, loss, indices in self.seen:
            if not math.isfinite(value := loss.item()):
                found = indices.flatten().tolist() if isinstance(indices, Tensor) else []
                return step, value, [index for index in found if index >= 0]  # without fillers
        return None

    def words(self, trainer: Trainer) -> str:
        """Every process must call it."""
        everyone: list[Any] = [self.first()] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(everyone, everyone[trainer.global_rank])
        step, rank = min((found[0], rank) for rank, found in enumerate(everyone) if found)
        _, loss, samples = everyone[rank]
        of = f" on rank {rank}" if trainer.world_size > 1 else ""
        more = ", ..." if len(samples) > SHOWN else ""
        batch = f", in a batch of the training samples {', '.join(map(str, samples[:SHOWN]))}{more}" if samples else ""
        good = next((path for path in checkpoints(Path(trainer.default_root_dir)) if step_of(path) < step), None)
        start = f" The last checkpoint before it is {good}: init_from={good} starts a new run from it." if good else ""
        return (
            f"the loss is {loss} at step {step} (epoch {trainer.current_epoch}){of}{batch}. Try a lower optim.lr, "
            f"trainer.gradient_clip_val=1.0, or trainer.detect_anomaly=true to find the operation that produces it.{start}"
        )
