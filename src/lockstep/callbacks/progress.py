"""A progress bar on a terminal, a line now and then elsewhere: with loss, images/s and the time left."""

import sys
import time
from typing import Any

import lightning.pytorch as pl
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from lockstep.console import say
from lockstep.pace import completes_step, has_row

EVERY_S = 10.0  # between lines when the output is not a terminal


def clock(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


class TimeLeft(ProgressColumn):
    def render(self, task: Task) -> Text:
        done, total = task.completed, task.total or 0
        left = (task.elapsed or 0.0) * (total - done) / done if done else None
        return Text(f"{clock(left)} left" if left is not None else "")


class Progress(pl.Callback):
    """Follows the whole run, in optimizer steps. Figures are those of the last row of the log: no step waits for them."""

    def __init__(self) -> None:
        self.bar: Bar | None = None
        self.total = 0
        self.began_s = self.shown_s = 0.0
        self.first = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.total, self.first = int(trainer.estimated_stepping_batches), trainer.global_step
        self.began_s = self.shown_s = time.monotonic()
        if trainer.is_global_zero and sys.stdout.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TimeLeft(),
                TextColumn("{task.fields[figures]}"),
            )
            self.bar = Bar(*columns, refresh_per_second=4)
            self.bar.add_task("training", total=self.total, completed=self.first, figures="")
            self.bar.start()

    def figures(self, trainer: pl.Trainer) -> str:
        metrics: dict[str, Any] = {**trainer.callback_metrics, **trainer.progress_bar_metrics}
        shown = (
            ("loss", "train/loss", ".4f"),
            ("images/s", "train/images_per_s", ",.0f"),
            ("val/acc", "val/acc", ".4f"),
        )
        return " · ".join(f"{name} {float(metrics[key]):{form}}" for name, key, form in shown if key in metrics)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero or not completes_step(trainer, batch_idx):
            return
        step, row = trainer.global_step, has_row(trainer, trainer.global_step)
        if self.bar is not None:
            task = self.bar.task_ids[0]
            self.bar.update(task, completed=step, description=f"epoch {trainer.current_epoch + 1}")
            if row:
                self.bar.update(task, figures=self.figures(trainer))
        elif row and time.monotonic() - self.shown_s > EVERY_S:
            self.shown_s = time.monotonic()
            left = clock((self.shown_s - self.began_s) * (self.total - step) / (step - self.first))
            say(f"epoch {trainer.current_epoch + 1} · step {step}/{self.total} · {left} left · {self.figures(trainer)}")

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.stop()
