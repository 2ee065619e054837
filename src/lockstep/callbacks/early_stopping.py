"""Lightning's early stopping, made exact for resumed runs."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason


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
