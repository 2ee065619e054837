"""What ends a run before its last step: a time limit, a metric that no longer improves, a loss that is no number, a monitor that nothing logs, a loss that communicates."""

import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from omegaconf import DictConfig
from torch import Tensor

from lockstep.checkpoints.finding import checkpoints, step_of
from lockstep.compat.torch import CollectiveCounter
from lockstep.config.words import nearest
from lockstep.errors import LossNotFinite, TrainingFailed, UserError
from lockstep.training.steps import completes_step, has_row, steps_done
from lockstep.training.workload import workload

# --- Ends a run at trainer.max_time ---

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


# --- Lightning's early stopping, made exact for resumed runs ---


class EarlyStopping(callbacks.EarlyStopping):
    """Lightning's does not save that it stopped, and restores the patience of the checkpoint over the config's.

    It does save its counters."""

    stopped = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})
        # by a threshold or a NaN. Patience is checked again, because it may be longer now
        again = (EarlyStoppingReason.NOT_STOPPED.value, EarlyStoppingReason.PATIENCE_EXHAUSTED.value)
        self.stopped = state_dict["stopping_reason"] not in again

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.stopped or self.wait_count >= self.patience


# --- Stops a run whose loss is no longer a number ---

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


# --- Stops a run that watches a figure which nothing logs. config/rules.py refuses what is known before the run ---


class Monitored(Callback):
    """Fails after the first validation, or at the end of training for callbacks that may look later; saves a checkpoint first.

    A training that ends before its first validation logs no figure of one, and passes.
    """

    def __init__(self, cfg: DictConfig, save: Callable[[Trainer], None] | None) -> None:
        self.save, self.validated = save, False
        self.early = {"checkpoint.monitor": cfg.checkpoint.monitor} if save and cfg.checkpoint.monitor else {}
        self.late: dict[str, str] = {}
        for name, node in cfg.callbacks.items():
            if node.get("monitor") is not None:
                validates = node.get("check_on_train_epoch_end") is False
                (self.early if validates else self.late)[f"callbacks.{name}.monitor"] = node.monitor

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validated = True
            self.refuse(trainer, self.early)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.validated:
            self.refuse(trainer, self.late)

    def refuse(self, trainer: Trainer, watched: dict[str, str]) -> None:
        found = sorted(trainer.callback_metrics)
        for key, monitor in watched.items():
            if monitor in found:
                continue
            if self.save:
                self.save(trainer)
            goes_on = " resume=auto to continue" if self.save else ""
            name = workload(trainer.lightning_module, trainer.datamodule).title  # type: ignore[attr-defined]
            keeps = key == "checkpoint.monitor"
            last = ", or checkpoint.monitor=null to keep the last checkpoint only" if keeps else ""
            raise TrainingFailed(
                f"{key}={monitor} is not logged by {name}, which logs {', '.join(found) or 'nothing'}{nearest(monitor, found)}. "
                f"Type {key}=<one of them>{goes_on}{last}."
            )


# --- Refuses a task that communicates on its own where each micro-batch has a loss of its own: the result would depend on how a batch ---
#
# is divided, which nothing else tells.


class TaskCollectives(Callback):
    """Watches the first micro-batch of a process. One process alone is not watched: tasks communicate if there are several."""

    def __init__(self) -> None:
        self.counter, self.division = CollectiveCounter(), ""
        # The task's own attributes named `loss` and `outputs`, to put back; None: it is not watched.
        self.own: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        self.division = module.arithmetic.division(trainer.accumulate_grad_batches)
        if trainer.world_size > 1 and self.division:
            task = module.task
            watched = {"loss": self.watched_loss(task.loss), "outputs": self.watched_outputs(task.outputs)}
            self.own = {name: vars(task)[name] for name in watched if name in vars(task)}
            vars(task).update(watched)  # not setattr, which refuses the name of a submodule

    def watched_loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self.counter:
                return loss(*args)

        return call

    def watched_outputs(self, outputs: Callable[..., Any]) -> Callable[..., Any]:
        """Without what the network does: a sharded one is gathered, and its batch norm may be synchronised."""

        def call(net: Callable[..., Any], batch: Any) -> Any:
            def unwatched(*args: Any, **kwargs: Any) -> Any:
                self.counter.__exit__(None, None, None)
                try:
                    return net(*args, **kwargs)
                finally:
                    self.counter.__enter__()

            with self.counter:
                return outputs(unwatched, batch)

        return call

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.own is None:
            return
        task: Any = pl_module.task
        del vars(task)["loss"], vars(task)["outputs"]
        vars(task).update(self.own)
        self.own = None
        if not self.counter.count:
            return
        raise UserError(
            f"{type(task).__name__} communicates between processes in its loss or outputs, and {self.division} divides each process's samples: "
            "the result would depend on how. Set `between_samples = True` in the class, and the loss gets the samples of all processes without "
            f"communicating; then leave {self.division} out."
        )
