"""Lightning's early stopping, exact when a run is resumed."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason


class EarlyStopping(callbacks.EarlyStopping):
    """Lightning's keeps its counters in checkpoints, but not that it has asked for the end; and it takes the patience
    of the checkpoint in place of the config's."""

    stopped = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})
        # by a threshold or a loss that is no number; patience may be longer now
        self.stopped = state_dict["stopping_reason"] not in (
            EarlyStoppingReason.NOT_STOPPED.value,
            EarlyStoppingReason.PATIENCE_EXHAUSTED.value,
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.stopped or self.wait_count >= self.patience
