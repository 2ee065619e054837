"""What must not go on: a loss that is no number, a monitored metric that nothing logs, a loss that communicates within a divided batch."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lockstep.checkpoints.finding import checkpoints, step_of
from lockstep.compat.torch import CollectiveCounter
from lockstep.errors import LossNotFinite, TrainingFailed, UserError, did_you_mean
from lockstep.machine.world import objects_of_all
from lockstep.training.steps import completes_step, has_row, steps_done
from lockstep.training.workload import workload

KEPT, SHOWN = 1000, 16  # losses since the last log row; samples in the message


class FiniteLoss(Callback):
    """Ends a run whose loss is NaN or infinite. It looks whenever the loss is logged, and at the end: no other step waits for it.

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
            raise LossNotFinite(self.message(trainer))
        self.seen.clear()

    def first(self) -> tuple[int, float, list[int]] | None:
        """The step, the loss and the samples of this process's first batch whose loss is no number."""
        for step, loss, indices in self.seen:
            if not math.isfinite(value := loss.item()):
                samples = indices.flatten().tolist() if isinstance(indices, Tensor) else []
                return step, value, [index for index in samples if index >= 0]  # without fillers
        return None

    def message(self, trainer: Trainer) -> str:
        """Every process must call it."""
        everyone = objects_of_all(self.first())
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
        task = module.task
        loss, outputs, counter = task.loss, task.outputs, self.counter

        def watched_loss(*args: Any) -> Any:
            with counter:
                return loss(*args)

        def watched_outputs(net: Callable[..., Any], batch: Any) -> Any:
            """Without what the network does: a sharded one is gathered, and its batch norm may be synchronised."""

            def unwatched(*args: Any, **kwargs: Any) -> Any:
                counter.__exit__(None, None, None)
                try:
                    return net(*args, **kwargs)
                finally:
                    counter.__enter__()

            with counter:
                return outputs(unwatched, batch)

        self.own = {name: vars(task)[name] for name in ("loss", "outputs") if name in vars(task)}
        # Not setattr, which rejects the name of a submodule.
        vars(task).update(loss=watched_loss, outputs=watched_outputs)

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
