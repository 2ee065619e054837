"""TensorBoard: figures, the config, panels as images, the status."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from lockstep.reporting.panel_images import sheet
from lockstep.reporting.tracking import flat


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
