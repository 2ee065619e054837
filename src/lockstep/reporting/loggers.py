"""metrics.csv, which is always written, and what all loggers need. W&B and MLflow have a file of their own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from lockstep.reporting.background import Background
from lockstep.reporting.panels import sheet
from lockstep.reporting.tracking import flat
from lockstep.reporting.wandb_logger import wandb
from lockstep.run.folder import RunFolder
from lockstep.training.steps import steps_done

# --- metrics.csv, which is always written, and what all loggers need at a resume. The others each have a file of their own ---

# Configs name the last two by this module.
__all__ = ["CutAtResume", "MetricsCsv", "in_background", "tensorboard", "wandb"]


class MetricsCsv(Logger):
    """runs/<name>/metrics.csv: a row per logged step, a column per metric."""

    name, version = "csv", ""  # type: ignore[assignment]

    def __init__(self, *, run_dir: Path, run: str) -> None:
        super().__init__()
        self.log = RunFolder(run_dir).metrics_log

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the config is in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.log.append({"step": step, **{name: float(value) for name, value in metrics.items()}})


class CutAtResume(pl.Callback):
    """Cuts logs at the checkpoint's step, so no row is written twice. W&B keeps what it has been sent."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.earlier = folder, folder.report()  # of the run before it was resumed

    @rank_zero_only
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Also with nothing left to train: a resumed run will test again."""
        if self.earlier:
            self.folder.drop_tests(self.earlier)

    @rank_zero_only
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_fit_end(trainer, pl_module)
        if steps := steps_done(trainer):
            self.folder.cut(steps)
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
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
