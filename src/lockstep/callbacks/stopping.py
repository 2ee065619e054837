"""What ends a run early, in all processes at the same step: a warning by the system, a time limit, a metric that no longer improves."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from lockstep.errors import Interrupted, Preempted
from lockstep.machine import process
from lockstep.machine.world import TORCHRUN, external_launcher
from lockstep.training.steps import completes_step, steps_done

LOOK_S = 1.0  # seconds between two questions to all processes


class Pace:
    """When to ask all processes again: after about LOOK_S seconds, in steps. Rank 0's answer counts."""

    def __init__(self, step: int) -> None:
        self.step, self.at_s = step, time.monotonic()

    def next_step(self, step: int, within_s: float = LOOK_S) -> int:
        began_s, self.at_s = self.at_s, time.monotonic()
        step_s = (self.at_s - began_s) / max(1, step - self.step)
        self.step = step
        return step + max(1, round(within_s / max(1e-6, step_s)))


# --- A warning by the system that it will end the run ---

looks = itertools.count()  # of this process; all processes look at the same steps
KEPT = 100  # answers in the store; no process is so far behind
WARNED, AGAIN = "preemption/warned", "type the command again with resume=auto"


@dataclass(eq=False)
class Preemption(Callback):
    """Saves the last checkpoint at the next step and ends the run, in all processes at the same step.

    Once a second they ask their common store: a warned process leaves a word there, and rank 0 says for all whether to end and at
    which step to ask again. Other steps only compare numbers. It needs no collective, and no process group besides nccl's.
    """

    save: Callable[[Trainer], None] | None
    next_look: int = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning 2.6 broadcasts in its SIGTERM handler, which the other processes do not expect. A process of a launcher gets
        # each Ctrl-C from the terminal and from its parent.
        alone = trainer.world_size == 1 and not process.supervised
        process.install(interrupt=process.on_interrupt if alone else process.on_signal)
        self.next_look, self.pace = steps_done(trainer) + 1, Pace(steps_done(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches or not self.warned(trainer):
            return
        if self.save:
            self.save(trainer)
        by = process.received[0].name if process.received else process.store.get(WARNED).decode()
        ended = f"ended by {by} after {steps_done(trainer)} steps"
        if self.save and external_launcher(os.environ) == TORCHRUN and self.kind() is Preempted:
            raise Preempted(
                f"{ended}; everything is saved. torchrun ends all processes when a node joins or leaves; it starts them again, and "
                f"with resume=auto they continue. If torchrun itself was ended, {AGAIN}."
            )
        raise self.kind()(f"{ended}; {AGAIN} to continue." if self.save else f"{ended}.")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        process.install()

    on_test_start = on_predict_start = on_validation_start

    def on_test_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Everything is saved already, so processes need not agree."""
        if process.received:
            told = f"test; {AGAIN}" if trainer.testing else "prediction; nothing was written. Run it again"
            raise self.kind()(f"ended by {process.received[0].name} during the {told}.")

    on_predict_batch_start = cast(Any, on_test_batch_start)

    def kind(self) -> type[Preempted]:
        return Interrupted if process.received[:1] == [signal.SIGINT] else Preempted

    def warned(self, trainer: Trainer) -> bool:
        """Whether any process was warned; the answer is the same in all of them."""
        if trainer.world_size == 1:
            return bool(process.received)
        if steps_done(trainer) < self.next_look:
            return False
        store, look = process.store, next(looks)
        if process.received:
            store.set(WARNED, f"{process.received[0].name} to rank {trainer.global_rank}")
        if trainer.global_rank == 0:
            store.set(f"preemption/{look}", f"{self.pace.next_step(steps_done(trainer))} {int(store.check([WARNED]))}")
            store.delete_key(f"preemption/{look - KEPT}")
        self.next_look, warned = map(int, store.get(f"preemption/{look}").split())
        return bool(warned)


# --- trainer.max_time ---


class Timer(callbacks.Timer):
    """Lightning's asks rank 0 after each micro-batch, by a broadcast that each GPU waits for; this one about once a second."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.pace, self.next_look = Pace(steps_done(trainer)), 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = steps_done(trainer)
        if not completes_step(trainer, batch_idx) or step < self.next_look:
            return
        left_s = max(0.0, self.time_remaining() or 0.0)
        again = self.pace.next_step(step, min(LOOK_S, left_s))
        over, self.next_look = trainer.strategy.broadcast((left_s == 0, again))
        if over:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)  # once more, for its message


# --- A metric that no longer improves ---


class EarlyStopping(callbacks.EarlyStopping):
    """Lightning's does not save that it stopped, and restores the patience of the checkpoint over the config's.

    It does save its counters."""

    stopped = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})
        # by a threshold or a NaN. Patience is checked again, because it may be longer now
        again = (EarlyStoppingReason.NOT_STOPPED.value, EarlyStoppingReason.PATIENCE_EXHAUSTED.value)
        self.stopped = state_dict["stopping_reason"] not in again

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.stopped or self.wait_count >= self.patience
