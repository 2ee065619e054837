"""Ends a run in good order when the system has warned that it is going to end it."""

import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch

from lockstep.errors import Preempted
from lockstep.machine import signals
from lockstep.training.steps import steps_done

LOOK_S = 1.0  # how often the processes ask each other whether one was warned


class Preemption(pl.Callback):
    """Saves the last checkpoint at the next step and ends, all processes at the same one.

    They agree by one all-reduce of two numbers a second, on the CPU; in between, a look costs a comparison.
    """

    def __init__(self, save: Callable[[pl.Trainer], None] | None) -> None:
        self.save = save
        self.group: Any = None
        self.next_look = 0
        self.looked_at = (0, 0.0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        signals.install()  # Lightning 2.6 puts a broadcast into its handler of SIGTERM, which other processes do not expect
        self.next_look = steps_done(trainer) + 1
        self.looked_at = steps_done(trainer), time.monotonic()
        if trainer.world_size > 1 and torch.distributed.get_backend() != "gloo":
            self.group = torch.distributed.new_group(backend="gloo")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches or not self.warned(trainer):
            return
        if self.save:
            self.save(trainer)
        raise Preempted(self.words(trainer))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        signals.install()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        signals.install()

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if signals.received:  # everything has been saved; no need to agree
            raise Preempted(f"ended by {signals.received[0].name} while it was tested; type it again with resume=auto.")

    def words(self, trainer: pl.Trainer) -> str:
        by = signals.received[0].name if signals.received else "a signal to another process"
        return f"ended by {by} after {steps_done(trainer)} steps" + (
            "; type it again with resume=auto to go on." if self.save else "."
        )

    def warned(self, trainer: pl.Trainer) -> bool:
        """Whether any process was; the same answer in all of them."""
        if trainer.world_size == 1:
            return bool(signals.received)
        step = steps_done(trainer)
        if step < self.next_look:
            return False
        since, began_s = self.looked_at
        now_s = time.monotonic()
        steps = max(1, round((step - since) * LOOK_S / max(1e-6, now_s - began_s)))
        found = torch.tensor([int(bool(signals.received)), steps])
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self.group)
        self.next_look, self.looked_at = step + int(found[1]), (step, now_s)
        return bool(found[0])
