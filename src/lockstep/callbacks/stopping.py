"""What ends a run before its time: a warning by the system, a time limit, a metric that no longer improves; a loss that is no number,
a monitored metric that nothing logs, a loss that communicates within a divided batch, processes that differ."""

import itertools
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from torch import Tensor

from lockstep.checkpoints.finding import checkpoints, step_of
from lockstep.compat.torch import CollectiveCounter
from lockstep.config.words import counted
from lockstep.errors import Interrupted, LossNotFinite, Preempted, TrainingFailed, UserError, did_you_mean
from lockstep.machine import process
from lockstep.machine.world import TORCHRUN, external_launcher, objects_of_all
from lockstep.training.steps import completes_step, has_row, steps_done
from lockstep.training.workload import workload

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
        ended = f"ended by {by} after {counted(steps_done(trainer), 'step')}"
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


# --- A loss that is no number ---

LOSSES, SHOWN = 1000, 16  # losses since the last log row; samples in the message


class FiniteLoss(Callback):
    """Ends a run whose loss is NaN or infinite. It looks whenever the loss is logged, and at the end: no other step waits for it.

    All processes decide alike: one that ended alone would leave the others waiting in their next all-reduce.
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
        if complete and has_row(trainer, steps_done(trainer)):
            self.look(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.look(trainer)

    def look(self, trainer: Trainer) -> None:
        bad = bool(self.seen) and not math.isfinite(self.seen[-1][1].item())  # SYNC: once every log_every_n_steps
        if trainer.strategy.reduce_boolean_decision(bad, all=False):
            raise LossNotFinite(self.message(trainer))
        self.seen.clear()

    def message(self, trainer: Trainer) -> str:
        """Names the first step with such a loss, and its samples. Every process must call it."""
        bad = ((step, loss.item(), index) for step, loss, index in self.seen if not math.isfinite(loss.item()))
        first = next(bad, None)
        if first:
            indices = first[2].flatten().tolist() if isinstance(first[2], Tensor) else []
            first = *first[:2], [index for index in indices if index >= 0]  # without fillers
        everyone = objects_of_all(first)
        step, rank = min((first[0], rank) for rank, first in enumerate(everyone) if first)
        _, loss, samples = everyone[rank]
        where = f" on rank {rank}" if trainer.world_size > 1 else ""
        if samples:
            more = ", ..." if len(samples) > SHOWN else ""
            where += f", in a batch of the training samples {', '.join(map(str, samples[:SHOWN]))}{more}"
        good = next((path for path in checkpoints(Path(trainer.default_root_dir)) if step_of(path) < step), None)
        start = f" The last checkpoint before it is {good}: init_from={good} starts a new run from it." if good else ""
        return (
            f"the loss is {loss} at step {step} (epoch {trainer.current_epoch}){where}. Try a lower optim.lr, "
            f"trainer.gradient_clip_val=1.0, or trainer.detect_anomaly=true to find the operation that produces it.{start}"
        )


# --- A monitored metric that nothing logs ---


@dataclass(eq=False)
class MonitorGuard(Callback):
    """Ends a run that monitors a metric which nothing logs; config/checks.py rejects what is known before the run.

    After the first validation, or at the end of training for callbacks that may look later. It saves a checkpoint first. A training
    that ends before its first validation logs no metric of one, and passes.
    """

    validated: Mapping[str, str]  # what is monitored at a validation, by its config key
    later: Mapping[str, str]
    save: Callable[[Trainer], None] | None
    has_validated: bool = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.has_validated = True
            self.check(trainer, self.validated)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.has_validated:
            self.check(trainer, self.later)

    def check(self, trainer: Trainer, monitors: Mapping[str, str]) -> None:
        logged = sorted(trainer.callback_metrics)
        for key, monitor in monitors.items():
            if monitor in logged:
                continue
            if self.save:
                self.save(trainer)
            again = " resume=auto to continue" if self.save else ""
            name = workload(trainer.lightning_module, trainer.datamodule).title  # type: ignore[attr-defined]
            last = ", or checkpoint.monitor=null to keep only the last" if key == "checkpoint.monitor" else ""
            raise TrainingFailed(
                f"{key}={monitor} is not logged by {name}, which logs {', '.join(logged) or 'nothing'}{did_you_mean(monitor, logged)}. "
                f"Set {key}=<one of them>{again}{last}."
            )


# --- A loss that communicates within a divided batch ---


class CollectivesGuard(Callback):
    """Rejects a task that communicates on its own where each micro-batch has a loss of its own: the result would depend on how a batch
    is divided, and nothing else would show it.

    It watches the first micro-batch of a process. One process alone is not watched: tasks communicate if there are several.
    """

    def __init__(self) -> None:
        self.counter, self.division = CollectiveCounter(), ""
        # The task's own attributes named `loss` and `outputs`, to put back; None: it is not watched.
        self.own: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        self.division = module.arithmetic.division(trainer.accumulate_grad_batches)
        if trainer.world_size == 1 or not self.division:
            return
        task, counter = module.task, self.counter

        def unwatched(net: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            """A network that is sharded is gathered, and its batch norm may be synchronised."""
            counter.__exit__(None, None, None)
            try:
                return net(*args, **kwargs)
            finally:
                counter.__enter__()

        loss, outputs = counter(task.loss), counter(task.outputs)
        self.own = {name: vars(task)[name] for name in ("loss", "outputs") if name in vars(task)}
        # Not setattr, which rejects the name of a submodule.
        vars(task).update(loss=loss, outputs=lambda net, batch: outputs(partial(unwatched, net), batch))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.own is None:
            return
        task: Any = pl_module.task
        del vars(task)["loss"], vars(task)["outputs"]
        vars(task).update(self.own)
        self.own = None
        if self.counter.count:
            raise UserError(
                f"{type(task).__name__} communicates between processes in its loss or outputs, and {self.division} divides each process's samples: "
                "the result would depend on how. Set `between_samples = True` in the class, and the loss gets the samples of all processes "
                f"without communicating; then leave {self.division} out."
            )


# --- Processes that differ ---


@dataclass(eq=False)
class RankAgreement(Callback):
    """Ends the run if a process has another value than rank 0. The keys are verbs, such as `computes in precision`."""

    values: Mapping[str, object]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for what, own in self.values.items():
            self.check(trainer, what, own)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.check(trainer, "continues after step", steps_done(trainer))

    @staticmethod
    def check(trainer: Trainer, what: str, own: object) -> None:
        first = trainer.strategy.broadcast(own)
        if own != first:
            raise TrainingFailed(
                f"rank {trainer.global_rank} {what} {own}, but rank 0 {first}: all nodes must see the same files. Check runs_dir and "
                "data.root. On different hardware set trainer.precision=32-true, or bf16-mixed."
            )
