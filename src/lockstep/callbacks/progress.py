"""Progress of training, and of an evaluation or a prediction. See reporting/progress.py for how it is shown."""

import math
import time
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer

from lockstep.callbacks.throughput import size_of, waited_s
from lockstep.reporting.progress import Line, clock
from lockstep.training.steps import completes_step, has_row, steps_done, total_steps


def unit_of(trainer: Trainer) -> str:
    return str(getattr(trainer.datamodule, "unit", "samples"))  # type: ignore[attr-defined]


def fn_of(trainer: Trainer) -> str:
    return trainer.state.fn.value if trainer.state.fn else ""


class WithLine(Callback):
    """Ends its line with what it follows. Only rank 0 has one."""

    line: Line | None = None

    def stop(self, *_: Any) -> None:
        if self.line is not None:
            self.line.end()
            self.line = None

    on_exception = cast(Any, stop)


class Progress(WithLine):
    """Follows the whole run, in optimizer steps. It shows the figures of the last log row, so no step waits for them."""

    def __init__(self, monitor: str | None = None) -> None:
        self.monitor = monitor  # shown beside the loss
        self.row, self.row_s, self.waited_s = "", 0.0, 0.0
        self.saved_s: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.row_s, self.waited_s = time.monotonic(), waited_s(trainer)
        if trainer.is_global_zero:
            self.line = Line("step", total_steps(trainer), steps_done(trainer))

    def on_save_checkpoint(self, *_: Any) -> None:
        self.saved_s = time.monotonic()

    def figures(self, trainer: Trainer) -> str:
        metrics: dict[str, Any] = {**trainer.callback_metrics, **trainer.progress_bar_metrics}
        rate = f"train/{unit_of(trainer)}_per_s"
        now_s, waited = time.monotonic(), waited_s(trainer)
        share = (waited - self.waited_s) / max(1e-9, now_s - self.row_s)
        self.row_s, self.waited_s = now_s, waited
        shown = [f"loss {float(metrics['train/loss']):.4f}"] if "train/loss" in metrics else []
        shown += [f"{float(metrics[rate]):,.0f} {unit_of(trainer)}/s"] if rate in metrics else []
        shown += [] if math.isnan(share) else [f"{share:.0%} waiting for data"]
        others = dict.fromkeys(name for name in (self.monitor, *trainer.progress_bar_metrics) if name)
        shown += [f"{n} {float(metrics[n]):.4f}" for n in others if n in metrics and n not in ("train/loss", rate)]
        return " · ".join(shown)

    def show(self, trainer: Trainer, more: str = "") -> None:
        assert self.line is not None
        if not self.line.due(steps_done(trainer)):
            return
        saved = "" if self.saved_s is None else f"saved {clock(time.monotonic() - self.saved_s)} ago"
        self.line.show(f"epoch {trainer.current_epoch + 1}", steps_done(trainer), more, self.row, saved)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.line is not None and completes_step(trainer, batch_idx):
            if has_row(trainer, steps_done(trainer)):
                self.row = self.figures(trainer)
            self.show(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: int
    ) -> None:
        if self.line is not None:
            self.show(trainer, f"validation batch {batch_idx + 1:,}")

    on_train_end = cast(Any, WithLine.stop)


class PassProgress(WithLine):
    """Follows one pass over a part of the data: a validation, a test or a prediction."""

    def __init__(self) -> None:
        self.done = self.samples = 0
        self.began_s = 0.0

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        counts = {"test": trainer.num_test_batches, "predict": trainer.num_predict_batches}
        self.began_s = time.monotonic()
        if trainer.is_global_zero:
            self.line = Line("batch", sum(counts.get(fn_of(trainer), trainer.num_val_batches)))

    def step(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: int
    ) -> None:
        if self.line is not None:
            self.done += 1
            self.samples += size_of(batch) * trainer.world_size
            if not self.line.due(self.done):
                return
            rate = self.samples / max(1e-9, time.monotonic() - self.began_s)
            self.line.show(fn_of(trainer), self.done, f"{rate:,.0f} {unit_of(trainer)}/s")

    on_validation_start = on_test_start = on_predict_start = begin
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = cast(Any, step)
    on_validation_end = on_test_end = on_predict_end = cast(Any, WithLine.stop)
