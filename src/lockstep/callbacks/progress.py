"""Progress: a bar on a terminal, otherwise a line every few seconds, with loss, images/s and the time left."""

import math
import sys
import time
from typing import Any

import lightning.pytorch as pl
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from lockstep.reporting.console import say
from lockstep.training.steps import completes_step, has_row, steps_done, total_steps

EVERY_S = 10.0  # seconds between lines when the output is not a terminal


def clock(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def time_left(elapsed_s: float, done: int, to_do: int) -> str:
    """The time left, from the steps of this process only: earlier steps of a resumed run took no time now."""
    return f"{clock(elapsed_s * to_do / done)} left" if done else ""


class Progress(pl.Callback):
    """Follows the whole run, in optimizer steps. It shows the figures of the last log row, so no step waits for them."""

    def __init__(self, monitor: str | None = None) -> None:
        self.monitor = monitor  # shown beside the loss
        self.bar: Bar | None = None
        self.total: int | None = None  # None without an end, as with max_epochs=-1
        self.began_s = self.shown_s = 0.0
        self.first = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        total = total_steps(trainer)
        self.total, self.first = (None if math.isinf(total) else int(total)), steps_done(trainer)
        self.began_s = self.shown_s = time.monotonic()
        if trainer.is_global_zero and sys.stdout.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[left]}"),
                TextColumn("{task.fields[figures]}"),
            )
            self.bar = Bar(*columns, refresh_per_second=4)
            self.bar.add_task("training", total=self.total, completed=self.first, left="", figures="")
            self.bar.start()

    def figures(self, trainer: pl.Trainer) -> str:
        metrics: dict[str, Any] = {**trainer.callback_metrics, **trainer.progress_bar_metrics}
        unit = getattr(trainer.datamodule, "unit", "samples")  # type: ignore[attr-defined]
        shown = [("loss", "train/loss", ".4f"), (f"{unit}/s", f"train/{unit}_per_s", ",.0f")]
        known = [key for _, key, _ in shown]
        shown += [
            (name, name, ".4f") for name in (self.monitor, *trainer.progress_bar_metrics) if name and name not in known
        ]
        return " · ".join(f"{name} {float(metrics[key]):{form}}" for name, key, form in shown if key in metrics)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero or not completes_step(trainer, batch_idx):
            return
        step, row = steps_done(trainer), has_row(trainer, steps_done(trainer))
        if self.bar is not None:
            task = self.bar.task_ids[0]
            left = time_left(time.monotonic() - self.began_s, step - self.first, (self.total or step) - step)
            self.bar.update(task, completed=step, description=f"epoch {trainer.current_epoch + 1}", left=left)
            if row:
                self.bar.update(task, figures=self.figures(trainer))
        elif row and time.monotonic() - self.shown_s > EVERY_S:
            self.shown_s = time.monotonic()
            left = time_left(self.shown_s - self.began_s, step - self.first, (self.total or step) - step)
            say(
                f"epoch {trainer.current_epoch + 1} · step {step}/{self.total or '?'} · {left} · {self.figures(trainer)}"
            )

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.stop()
