"""Reasons to end a run early: preemption, a time limit, no more improvement, a non-finite loss, ranks that differ."""

import itertools
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from torch import Tensor

from lockstep.checkpoints.finding import checkpoints, leaves, step_of
from lockstep.config.formatting import pluralize
from lockstep.data.standard import global_batch, wrapped_loaders
from lockstep.errors import Interrupted, LossNotFinite, Preempted, TrainingFailed
from lockstep.machine import process
from lockstep.machine.world import all_gather_objects
from lockstep.reporting.console import print_line
from lockstep.training.arithmetic import completes_step, is_logging_step, steps_done
from lockstep.training.losses import sample_at

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
IN_VALIDATION = f"during a validation; {AGAIN} to continue from the last checkpoint"


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

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """A resumed run does not repeat a validation, so it is finished before saving, unless it may never end."""
        if math.inf in trainer.num_val_batches and self.is_warned(trainer):
            raise self.ended(IN_VALIDATION)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """If rank 0, which hosts the store, loses a warned process in an evaluation, it ends like that process."""
        lost = isinstance(exception, RuntimeError) and not isinstance(exception, Preempted) and trainer.world_size > 1
        is_endless = trainer.validating and math.inf in trainer.num_val_batches
        evaluates = trainer.testing or trainer.predicting or is_endless
        if lost and evaluates and trainer.is_global_zero and process.store.check([WARNED]):
            raise self.ended(IN_VALIDATION if is_endless else DURING[trainer.testing]) from None

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

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if completes_step(trainer, batch_idx) and self.poll(trainer, lambda: (self.time_remaining() or 0) <= 0):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


# --- A metric that no longer improves ---


class EarlyStopping(callbacks.EarlyStopping):
    """Remains stopped when a run is resumed, and uses the config's patience.

    Lightning restores only the counters, and replaces the config's patience with the checkpoint's. Here its error for
    a metric that nothing logs has no traceback.
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

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self.explained(trainer):
            super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self.explained(trainer):
            super().on_train_epoch_end(trainer, pl_module)

    @contextmanager
    def explained(self, trainer: Trainer) -> Iterator[None]:
        """Converts Lightning's error for a metric that nothing logs. Others, such as a lost process, are unchanged."""
        try:
            yield
        except RuntimeError as e:
            if self.monitor in trainer.callback_metrics:
                raise
            raise TrainingFailed(f"callbacks.early_stopping.monitor={self.monitor}: {e}") from None


# --- A loss that is not finite ---

LOSSES, SHOWN = 1000, 16  # most losses kept since the last log row; samples in the message


class FiniteLoss(Callback):
    """Ends a run whose loss is NaN or infinite. Checks when the loss is logged and at the end, so no other step waits.

    All processes decide together: if one ended alone, the others would wait in their next all-reduce.
    """

    def __init__(self) -> None:
        self.seen: deque[tuple[int, Tensor, Any]] = deque(maxlen=LOSSES)  # step, loss, indices of the samples

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else None  # manual optimization may return anything
        complete = completes_step(trainer, batch_idx)
        if isinstance(loss, Tensor):
            indices = batch.get("index") if isinstance(batch, dict) else None
            self.seen.append((steps_done(trainer) + (not complete), loss.detach(), indices))
        if complete and is_logging_step(trainer, steps_done(trainer)):
            self.look(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.look(trainer)

    def look(self, trainer: Trainer) -> None:
        is_bad = bool(self.seen) and not math.isfinite(self.seen[-1][1].item())  # SYNC: once every log_every_n_steps
        if trainer.strategy.reduce_boolean_decision(is_bad, all=False):
            raise LossNotFinite(self.message(trainer))
        self.seen.clear()

    def message(self, trainer: Trainer) -> str:
        """Names the first step with such a loss, and the stored value that explains it, or its samples.

        Every process must call it.
        """
        bad_losses = ((step, loss.item(), index) for step, loss, index in self.seen if not math.isfinite(loss.item()))
        first = next(bad_losses, None)
        if first:
            first = *first[:2], first[2].flatten().tolist() if isinstance(first[2], Tensor) else []
        by_rank = all_gather_objects(first)
        step, rank = min((first[0], rank) for rank, first in enumerate(by_rank) if first)
        _, loss, samples = by_rank[rank]
        if odd_value := first_odd_value(trainer, step):
            return f"the loss is {loss} at step {step} (epoch {trainer.current_epoch}): {odd_value}. Correct the value, or remove the sample."
        where = f" on rank {rank}" if trainer.world_size > 1 else ""
        if samples:
            ellipsis = ", ..." if len(samples) > SHOWN else ""
            where += f", in a batch of the training samples {', '.join(map(str, samples[:SHOWN]))}{ellipsis}"
        last = next((path for path in checkpoints(Path(trainer.default_root_dir)) if step_of(path) < step), None)
        hint = f" The last earlier checkpoint is {last}; init_from={last} starts a new run from it." if last else ""
        return (
            f"the loss is {loss} at step {step} (epoch {trainer.current_epoch}){where}. Try a lower optim.lr, "
            f"trainer.gradient_clip_val=1.0, or trainer.detect_anomaly=true to find the operation that produces it.{hint}"
        )


def first_odd_value(trainer: Trainer, step: int) -> str:
    """The first non-finite value stored for a step of this epoch: `target of sample 5 is nan`; or an empty string."""
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    with suppress(Exception):  # the data may be unreadable now; the loss matters more
        position = -(-ready // trainer.accumulate_grad_batches) - 1 - (steps_done(trainer) - step)
        (loader,) = wrapped_loaders(trainer.train_dataloader)
        batch, _ = global_batch(loader.given, loader.division.seed, trainer.current_epoch, position)
        for row, index in enumerate(batch["index"].tolist()):
            for path, value in leaves(sample_at(batch, row, len(batch["index"]))):
                if isinstance(value, Tensor) and not value.isfinite().all():
                    return f"{'.'.join(map(str, path))} of sample {index} is {value[~value.isfinite()][0]}"
    return ""


# --- Processes that differ ---


@dataclass(eq=False)
class RankAgreement(Callback):
    """Ends the run if a process has a different value than rank 0. Keys are verbs, such as `computes in precision`."""

    values: Mapping[str, object]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for verb, value in self.values.items():
            self.check(trainer, verb, value)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.check(trainer, "continues after step", steps_done(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.require_agreement()  # type: ignore[attr-defined]

    @staticmethod
    def check(trainer: Trainer, verb: str, value: object) -> None:
        reference = trainer.strategy.broadcast(value)
        if value != reference:
            raise TrainingFailed(
                f"rank {trainer.global_rank} {verb} {value}, but rank 0 {verb} {reference}: all nodes must see the same files. Check runs_dir and "
                "data.root. On different hardware, set trainer.precision to 32-true or bf16-mixed."
            )
