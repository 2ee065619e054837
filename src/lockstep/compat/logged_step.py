"""The step that Lightning writes its logs under: the number of the optimizer step, as in the report and in names of checkpoints.

Lightning 2.6.6 counts apart from `trainer.global_step`, in `_batches_that_stepped`: it logs step 56 as 55, and adds one on resuming.
Here the count is the number of the step in progress. There is no public name for it. Remove this file when
tests/compat/test_logged_step.py finds that Lightning does the same.
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector


class StepsFromOne(_LoggerConnector):
    @property
    def should_update_logs(self) -> bool:
        """Lightning's rule reads the number of the step before."""
        loop = self.trainer.fit_loop.epoch_loop
        loop._batches_that_stepped -= 1
        try:
            return super().should_update_logs
        finally:
            loop._batches_that_stepped += 1


def log_steps_from_one(trainer: pl.Trainer) -> None:
    trainer._logger_connector.__class__ = StepsFromOne


def set_logged_step(trainer: pl.Trainer, step: int) -> None:
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def save_logged_step(fit_loop: dict[str, Any], step: int) -> None:
    """The steps done, in the `fit_loop` state of a checkpoint."""
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = step
