"""Reasons to end a run early: preemption, a time limit, no more improvement, a non-finite loss, ranks that differ."""

import itertools
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from torch import Tensor

from lockstep.config.formatting import pluralize
from lockstep.errors import Interrupted, LossNotFinite, Preempted, TrainingFailed
from lockstep.machine import process
from lockstep.machine.world import all_gather_objects
from lockstep.reporting.console import print_line
from lockstep.training.arithmetic import completes_step, logs_row, steps_done

# --- Asking all processes about once a second, at the same step in each ---

LOOK_S = 1.0  # seconds between two polls
KEPT = 100  # answers kept in the store; no process is that far behind
polls = itertools.count()  # numbers the polls of this process; all processes poll at the same steps


class Poll:
    """Rank 0 answers for all processes, and decides at which step to ask again. Other steps only compare numbers.

    The answer goes through the store of the processes. It needs no collective, which GPUs would wait for, and no
    process group in addition to nccl's.
    """

    def __init__(self, step: int) -> None:
        self.next_look, self.step, self.at_s = step + 1, step, time.monotonic()

    def __call__(self, trainer: Trainer, question: Callable[[], bool]) -> bool:
        if trainer.world_size == 1:
            return question()
        step, store = steps_done(trainer), process.store
        if step < self.next_look:
            return False
        look = next(polls)
        if trainer.global_rank == 0:
            began_s, self.at_s = self.at_s, time.monotonic()
            step_s = max(1e-6, (self.at_s - began_s) / max(1, step - self.step))
            next_step, self.step = step + max(1, round(LOOK_S / step_s)), step
            store.set(f"look/{look}", f"{next_step} {int(question())}")
            store.delete_key(f"look/{look - KEPT}")
        self.next_look, answer = map(int, store.get(f"look/{look}").split())
        return bool(answer)


# --- Preemption: the system warns that it will end the run ---

WARNED, AGAIN = "preemption/warned", "rerun the command with resume=auto"
DURING = "during the prediction; nothing was written. Rerun the command", f"during the test; {AGAIN}"


@dataclass(eq=False)
class Preemption(Callback):
    """Saves the last checkpoint at the next step and ends the run, in all processes at the same step."""

    save: Callable[[Trainer], None] | None
    is_ending: bool = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # a launcher's process gets each Ctrl-C twice: from the terminal and from its parent
        alone = trainer.world_size == 1 and not process.started_by_lockstep
        process.install(interrupt=process.on_interrupt if alone else process.on_signal)
        self.poll = Poll(steps_done(trainer))

    def begin_step(self, trainer: Trainer) -> None:
        """Waits for the update of a module that accumulates gradients itself."""
        self.is_ending = self.is_ending or self.warned(trainer)
        if not self.is_ending or trainer.strategy.lacks_update:  # type: ignore[attr-defined]
            return
        if self.save:
            self.save(trainer)
        raise self.ended(f"after {pluralize(steps_done(trainer), 'step')}" + f"; {AGAIN} to continue" * bool(self.save))

    def on_test_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Everything is saved already, so processes need not agree."""
        if self.is_warned(trainer):
            raise self.ended(DURING[trainer.testing])

    on_predict_batch_start = cast(Any, on_test_batch_start)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """If rank 0, which hosts the store, loses a warned process in an evaluation, it ends like that process."""
        lost = isinstance(exception, RuntimeError) and not isinstance(exception, Preempted) and trainer.world_size > 1
        evaluates = trainer.testing or trainer.predicting
        if lost and evaluates and trainer.is_global_zero and process.store.check([WARNED]):
            raise self.ended(DURING[trainer.testing]) from None

    def ended(self, when: str) -> Preempted:
        sender = process.received[0].name if process.received else process.store.get(WARNED).decode()
        return (Interrupted if process.received[:1] == [signal.SIGINT] else Preempted)(f"ended by {sender} {when}.")

    def warned(self, trainer: Trainer) -> bool:
        """Whether any process was warned; the answer is the same in all of them."""
        is_warned = self.is_warned(trainer)
        return is_warned if trainer.world_size == 1 else self.poll(trainer, lambda: process.store.check([WARNED]))

    def is_warned(self, trainer: Trainer) -> bool:
        """Whether this process was warned. If so, notifies the others."""
        if process.received and trainer.world_size > 1:
            with suppress(RuntimeError):  # rank 0 has ended, and the store with it
                process.store.set(WARNED, f"{process.received[0].name} to rank {trainer.global_rank}")
        return bool(process.received)


# --- trainer.max_time ---


class Timer(callbacks.Timer):
    """Asks rank 0 about once a second.

    Lightning's Timer asks after each micro-batch, by a broadcast that each GPU waits for.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.poll = Poll(steps_done(trainer))

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if completes_step(trainer) and self.poll(trainer, lambda: (self.time_remaining() or 0) <= 0):
            super().on_train_batch_end(trainer)


# --- A metric that no longer improves ---


class EarlyStopping(callbacks.EarlyStopping):
    """Remains stopped when a run is resumed, and uses the config's patience.

    Lightning restores only the counters, and replaces the config's patience with the checkpoint's.
    """

    stopped = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})
        # stopped by a threshold or a NaN. Patience is checked again, because it may be longer now
        rechecked = (EarlyStoppingReason.NOT_STOPPED.value, EarlyStoppingReason.PATIENCE_EXHAUSTED.value)
        self.stopped = state_dict["stopping_reason"] not in rechecked

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.stopped or self.wait_count >= max(1, self.patience)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.stopping_reason_message:
            reason = self.stopping_reason_message.removesuffix(" Signaling Trainer to stop.")
            print_line(f"callbacks.early_stopping ended training: {reason}")


# --- A loss that is not finite ---

LOSSES, SHOWN = 1000, 16  # most losses kept since the last log row; samples in the message


class FiniteLoss(Callback):
    """Ends a run whose loss is NaN or infinite. Checks when the loss is logged and at the end, so no other step waits.

    All processes decide together: if one ended alone, the others would wait in their next all-reduce.
    """

    def __init__(self) -> None:
        self.seen: deque[tuple[int, Tensor, Any]] = deque(maxlen=LOSSES)  # step, loss, indices of the samples

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else None  # manual optimization may return anything
        if isinstance(loss, Tensor):
            indices = batch.get("index") if isinstance(batch, dict) else None
            self.seen.append((steps_done(trainer) + (not completes_step(trainer)), loss.detach(), indices))
        if logs_row(trainer):
            self.look(trainer)

    def look(self, trainer: Trainer, pl_module: Any = None) -> None:
        is_bad = bool(self.seen) and not math.isfinite(self.seen[-1][1].item())  # SYNC: once every log_every_n_steps
        if trainer.strategy.reduce_boolean_decision(is_bad, all=False):
            raise LossNotFinite(self.message(trainer))
        self.seen.clear()

    on_train_epoch_end = look

    def message(self, trainer: Trainer) -> str:
        """Names the first step with such a loss, and its samples. Every process must call it."""
        first: Any = next((each for each in self.seen if not math.isfinite(each[1].item())), None)
        if first:
            samples = first[2].flatten().tolist() if isinstance(first[2], Tensor) else []
            first = first[0], trainer.global_rank, first[1].item(), samples
        step, rank, loss, samples = min(filter(None, all_gather_objects(first)))
        where = f" on rank {rank}" if trainer.world_size > 1 else ""
        if samples:
            where += f", in a batch of the training samples {', '.join(map(str, samples[:SHOWN]))}{', ...' * (len(samples) > SHOWN)}"
        return (
            f"the loss is {loss} at step {step} (epoch {trainer.current_epoch}){where}. Look for values that are not finite in the data, try "
            "a lower optim.lr or trainer.gradient_clip_val=1.0, or find the operation with trainer.detect_anomaly=true."
        )


# --- Processes that differ ---


@dataclass(eq=False)
class RankAgreement(Callback):
    """Ends the run if a process has a different value than rank 0. Keys are verbs, such as `computes in precision`."""

    values: Mapping[str, object]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.check(trainer, self.values)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.check(trainer, {"continues after step": steps_done(trainer)})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.require_agreement()  # type: ignore[attr-defined]

    def check(self, trainer: Trainer, values: Mapping[str, object]) -> None:
        reference = trainer.strategy.broadcast(values)
        for verb, value in values.items():
            if value != reference[verb]:
                raise TrainingFailed(
                    f"rank {trainer.global_rank} {verb} {value}, but rank 0 {verb} {reference[verb]}: all nodes must see the same files. Check runs_dir and "
                    "data.root. On different hardware, set trainer.precision to 32-true or bf16-mixed."
                )
