"""Hooks around a user's LightningModule: its batch norms and its schedulers."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lockstep.compat.lightning import begin_loaders_anew
from lockstep.data.standard import standard
from lockstep.errors import UserError
from lockstep.strategies.batch_norm import synchronise
from lockstep.training.arithmetic import total_steps


@dataclass(eq=False, kw_only=True)
class CustomModule(Callback):
    """Used in training and in evaluation."""

    own_loaders: bool
    sync_batchnorm: bool
    # from the optimizer steps of a run to those from one row of the log to the next; None: the config sets them
    log_interval: Callable[[float], int] | None
    due: dict[int, float] = field(default_factory=dict)  # metrics that a scheduler has not seen yet, by its index

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The network is left as the module made it, except its batch norms."""
        if trainer.is_global_zero:  # here the module decides how its metrics are reduced, so show this warning
            warnings.filterwarnings("default", message=r".*It is recommended to use `self.log\(.*sync_dist=True\)`")
        if not self.own_loaders:  # Lockstep's datamodule calls the module's hooks
            warnings.filterwarnings("ignore", message="You have overridden `on_(before|after)_batch_transfer` in both")
        if self.sync_batchnorm:
            synchronise(pl_module, trainer.strategy.root_device.type)
        data = trainer.datamodule  # type: ignore[attr-defined]
        for split in () if self.own_loaders else (data.val_split, data.test_split):
            if split.count < trainer.world_size:
                raise UserError(
                    f"{split.count} samples of an evaluation cannot be divided among {trainer.world_size} processes. Set "
                    f"trainer.devices={split.count}, or evaluate more samples."
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loaders = standard(trainer.train_dataloader)
        if any(loader.began not in (None, loader.division.position()) for loader in loaders):
            begin_loaders_anew(trainer)
        if self.log_interval:
            trainer.log_every_n_steps = self.log_interval(total_steps(trainer))  # type: ignore[attr-defined]
        for index, metric in self.due.items():
            pl_module.lr_scheduler_step(trainer.lr_scheduler_configs[index].scheduler, metric)
        self.due = {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.own_loaders:
            checkpoint["divided"] = True  # in earlier versions `batch_size` was that of each process
        checkpoint["plateau"] = self.due or due_at_epoch_end(trainer, checkpoint["loops"]["fit_loop"])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.due = checkpoint["plateau"]


def due_at_epoch_end(trainer: Trainer, loop: dict[str, Any]) -> dict[int, float]:
    """Metrics that each ReduceLROnPlateau still needs: Lightning steps it after the checkpoint at an epoch's end, so a resumed
    run would skip that step."""
    batches, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]["current"]["started"]
    current = batches["current"]
    ended = current["processed"] >= trainer.num_training_batches or batches["is_last_batch"]
    if not ended or current["ready"] != current["processed"] or not trainer.lightning_module.automatic_optimization:
        return {}
    return {
        index: float(trainer.callback_metrics[config.monitor])
        for index, config in enumerate(trainer.lr_scheduler_configs)
        if config.reduce_on_plateau and config.interval == "epoch" and (epochs + 1) % config.frequency == 0
        if config.monitor in trainer.callback_metrics
    }
