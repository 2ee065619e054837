"""The step that Lightning writes its logs under.

Lightning 2.6.6 counts it apart from `trainer.global_step`, as `_batches_that_stepped`. It adds one on resuming, since most hooks
that save a checkpoint run before the step is counted; logs of a checkpoint saved in `on_train_batch_start` are then one step off.
There is no public name for the count. Remove this file when tests/compat/test_logged_step.py finds the two counts equal.
"""

from typing import Any

import lightning.pytorch as pl


def set_logged_step(trainer: pl.Trainer, step: int) -> None:
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def save_logged_step(fit_loop: dict[str, Any], step: int) -> None:
    """The same in the `fit_loop` state of a checkpoint."""
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = step
