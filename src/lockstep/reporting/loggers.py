"""metrics.csv, which is always written, and what all loggers need. W&B and MLflow have a file of their own."""

import csv
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from lockstep.config.run_files import whole_rows
from lockstep.errors import TrainingFailed
from lockstep.machine import files
from lockstep.reporting import digests
from lockstep.reporting.background import Background
from lockstep.reporting.panels import sheet
from lockstep.reporting.tracking import flat
from lockstep.reporting.wandb_logger import wandb
from lockstep.training.steps import steps_done

# --- metrics.csv, which is always written, and what all loggers need at a resume. The others each have a file of their own ---

# Configs name the last two by this module.
__all__ = ["CutAtResume", "MetricsCsv", "in_background", "tensorboard", "wandb"]
log = logging.getLogger("lockstep")


class MetricsCsv(Logger):
    """runs/<name>/metrics.csv: a row per logged step, a column per metric."""

    name, version = "csv", ""  # type: ignore[assignment]

    def __init__(self, *, run_dir: Path, run: str) -> None:
        super().__init__()
        self.path = run_dir / "metrics.csv"
        self.columns: list[str] = []

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the config is in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row: dict[str, Any] = {"step": step, **{name: float(value) for name, value in metrics.items()}}
        if not self.path.exists():
            self.begin_anew()
        elif not self.columns:
            self.columns = self.rows()[0]
        new = [name for name in row if name not in self.columns]
        if new:  # rewrites the file and replaces it
            old = self.rows()[1]
            self.columns = [*self.columns, *new]
            files.write_csv(self.path, self.columns, old)
        with files.naming(self.path), self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row)

    def begin_anew(self) -> None:
        if not self.path.parent.is_dir():
            raise TrainingFailed(f"{self.path.parent} was removed while the run was going on. Start it again.")
        if self.columns:
            log.warning("%s was removed while the run was going on: its earlier rows are lost", self.path)
        self.columns = []

    def rows(self) -> tuple[list[str], list[dict[str, str]]]:
        reader = whole_rows(self.path)
        return list(reader.fieldnames or []), list(reader)

    def keep(self, is_kept: Callable[[dict[str, str]], bool]) -> None:
        if self.path.exists():
            self.columns, rows = self.rows()
            files.write_csv(self.path, self.columns, [row for row in rows if is_kept(row)])

    @rank_zero_only
    def cut(self, steps: int) -> None:
        """Drops the rows after step `steps`, which a resumed run will write again."""
        self.keep(lambda row: int(row["step"]) <= steps)

    @rank_zero_only
    def drop_tests(self, report: Mapping[str, Any]) -> None:
        """Drops the rows that hold figures of the report and nothing else: a resumed run will test again."""
        self.keep(lambda row: any(value and name != "step" and name not in report for name, value in row.items()))


class CutAtResume(pl.Callback):
    """Cuts logs at the checkpoint's step, so no row is written twice. W&B keeps what it has been sent.

    `report` is that of the run before it was resumed.
    """

    def __init__(self, report: Mapping[str, Any]) -> None:
        self.report = report

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Also with nothing left to train."""
        for logger in trainer.loggers if self.report else ():
            if isinstance(logger, MetricsCsv):
                logger.drop_tests(self.report)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_fit_end(trainer, pl_module)
        steps = steps_done(trainer)
        for logger in trainer.loggers if steps else ():
            if isinstance(logger, MetricsCsv):
                logger.cut(steps)
                if trainer.is_global_zero:
                    digests.cut(logger.path.parent, steps)
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                writer = logger.experiment
                writer.close()  # it opens a new file that first purges older records from this step on
                writer.purge_step = steps + 1


def in_background(logger: Logger, name: str) -> Logger:
    logger.background = Background(logger, name)  # type: ignore[attr-defined]
    return logger


# --- TensorBoard: figures, the config, panels as images, the status ---


class TensorBoard(TensorBoardLogger):
    """The config is a text, and the run a row in the tab HParams, beside all figures."""

    @rank_zero_only
    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        super().log_hyperparams(params)  # adds them to `hparams`, for hparams.yaml
        values = flat(dict(self.hparams))
        rows = ["| key | value |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in values.items())]
        self.experiment.add_text("config", "\n".join(rows), 0)
        self.add_row(1, values)

    def add_row(self, part: int, params: dict[str, Any]) -> None:
        """Part 1 is the begin of the row in HParams, part 2 its end. A list of figures would be part 0: all are shown without it."""
        from torch.utils.tensorboard.summary import hparams

        self.experiment.file_writer.add_summary(hparams(params, {})[part])

    @rank_zero_only
    def log_pictures(self, name: str, pictures: Sequence[tuple[Any, str]], step: int) -> None:
        self.experiment.add_image(name, np.asarray(sheet(pictures).convert("RGB")), step, dataformats="HWC")

    @rank_zero_only
    def end(self, status: str, error: str | None, step: int) -> None:
        self.experiment.add_text("status", f"{status}: {error}" if error else status, step)
        if status == "done":  # of several ends TensorBoard shows the first, and a run that failed may be resumed
            self.add_row(2, {})


def tensorboard(*, run_dir: Path) -> TensorBoardLogger:
    return TensorBoard(save_dir=str(run_dir), name="tensorboard", version="", default_hp_metric=False)
