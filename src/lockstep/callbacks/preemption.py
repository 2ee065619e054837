"""Saves and ends a run when the system warns that it will be ended."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lockstep.errors import Interrupted, Preempted
from lockstep.machine import process
from lockstep.machine.world import TORCHRUN, external_launcher
from lockstep.training.steps import steps_done

looks = itertools.count()  # of this process; all processes look at the same steps
KEPT = 100  # answers in the store; no process is so far behind
WARNED, AGAIN = "preemption/warned", "type the command again with resume=auto"
LOOK_S = 1.0  # seconds between the questions whether any process was warned


class Preemption(Callback):
    """Saves the last checkpoint at the next step and ends the run, in all processes at the same step.

    Once a second they ask their common store: a warned process leaves a word there, and rank 0 says for all whether to end and at
    which step to ask again. Other steps only compare numbers. It needs no collective, and no process group besides nccl's.
    """

    def __init__(self, save: Callable[[Trainer], None] | None) -> None:
        self.save = save
        self.next_look = 0
        self.looked_at = (0, 0.0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning 2.6 broadcasts in its SIGTERM handler, which the other processes do not expect. A process of a launcher gets
        # each Ctrl-C from the terminal and from its parent.
        alone = trainer.world_size == 1 and not process.supervised
        process.install(interrupt=process.on_interrupt if alone else process.on_signal)
        self.next_look = steps_done(trainer) + 1
        self.looked_at = steps_done(trainer), time.monotonic()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches or not self.warned(trainer):
            return
        if self.save:
            self.save(trainer)
        raise self.kind()(self.words(trainer))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        process.install()

    on_test_start = on_predict_start = on_validation_start

    def on_test_batch_start(self, *_: Any) -> None:
        """Everything is saved already, so processes need not agree."""
        if process.received:
            raise self.kind()(f"ended by {process.received[0].name} during the test; {AGAIN}.")

    def on_predict_batch_start(self, *_: Any) -> None:
        if process.received:
            by = process.received[0].name
            raise self.kind()(f"ended by {by} during the prediction; nothing was written. Type the command again.")

    def kind(self) -> type[Preempted]:
        return Interrupted if process.received[:1] == [signal.SIGINT] else Preempted

    def words(self, trainer: Trainer) -> str:
        by = process.received[0].name if process.received else process.store.get(WARNED).decode()
        ended = f"ended by {by} after {steps_done(trainer)} steps"
        if self.save and external_launcher(os.environ) == TORCHRUN and self.kind() is Preempted:
            return (
                f"{ended}; everything is saved. torchrun ends all processes when a node joins or leaves; it starts them again, and "
                "with resume=auto they continue. If torchrun itself was ended, type the command again with resume=auto."
            )
        return f"{ended}; {AGAIN} to continue." if self.save else f"{ended}."

    def warned(self, trainer: Trainer) -> bool:
        """Whether any process was warned; the answer is the same in all of them."""
        if trainer.world_size == 1:
            return bool(process.received)
        step = steps_done(trainer)
        if step < self.next_look:
            return False
        store = process.store
        look = next(looks)
        if process.received:
            store.set(WARNED, f"{process.received[0].name} to rank {trainer.global_rank}")
        if trainer.global_rank == 0:
            since, began_s = self.looked_at
            self.looked_at = step, time.monotonic()
            steps = max(1, round((step - since) * LOOK_S / max(1e-6, self.looked_at[1] - began_s)))
            store.set(f"preemption/{look}", f"{step + steps} {int(store.check([WARNED]))}")
            store.delete_key(f"preemption/{look - KEPT}")
        self.next_look, found = map(int, store.get(f"preemption/{look}").split())
        return bool(found)
