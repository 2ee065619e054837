"""A LightningModule, a LightningDataModule and a callback that note each call of a hook, for tests/training/test_hooks.py."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

CALLS: list[tuple[str, ...]] = []


def note(*what: object) -> None:
    CALLS.append(tuple(map(str, what)))


def noting(kind: type, names: list[str]) -> Any:
    """A class whose methods `names` note that they were called, by whom, and with which kinds of arguments."""

    def method(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            kinds = [type(each).__name__ for each in (*args, *kwargs.values())]
            note(kind.__name__, name, *(each for each in kinds if each not in ("Trainer", "Noting")))
            return getattr(super(made, self), name)(*args, **kwargs)

        return call

    made = type("Noting", (kind,), {name: method(name) for name in names})
    return made


MODULE = """prepare_data on_fit_start on_fit_end on_train_start on_train_end on_train_epoch_start on_train_epoch_end on_train_batch_start
on_train_batch_end on_validation_start on_validation_end on_validation_epoch_start on_validation_epoch_end on_validation_batch_start
on_validation_batch_end on_validation_model_eval on_validation_model_train on_before_zero_grad on_before_backward on_after_backward
on_before_optimizer_step optimizer_step optimizer_zero_grad lr_scheduler_step configure_gradient_clipping configure_optimizers
configure_callbacks backward transfer_batch_to_device on_before_batch_transfer on_after_batch_transfer"""
CALLBACK = """on_fit_start on_train_start on_train_batch_start on_train_batch_end on_validation_batch_end on_sanity_check_start
on_sanity_check_end on_train_epoch_end on_validation_end on_before_optimizer_step on_fit_end"""


class Plain(pl.LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1))
        self.example_input_array = torch.zeros(2, 3)

    def forward(self, x):
        return self.net(x)

    def setup(self, stage):
        note("setup", stage.value, type(self.trainer.datamodule).__name__)

    def training_step(self, batch, batch_idx):
        y = self(batch[0])
        loss = F.mse_loss(y, batch[0].sum(1, keepdim=True))
        self.log_dict({"train_loss": loss, "train/double": 2 * loss}, on_step=True, on_epoch=True, prog_bar=True)
        note("step", self.current_epoch, self.global_step, batch_idx, self.trainer.num_training_batches)
        return {"loss": loss, "y": y.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        note("outputs", *sorted(outputs))

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        y = self(batch[0])
        self.log("val_loss", F.mse_loss(y, batch[0].sum(1, keepdim=True)), sync_dist=True)
        return {"y": y}

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        note("outputs", *sorted(outputs), dataloader_idx)

    def on_validation_epoch_end(self):
        note(
            "logger",
            isinstance(self.logger, TensorBoardLogger),
            *sorted(name for name in self.trainer.logged_metrics if "loss" in name),
        )
        self.logger.experiment.add_scalar("own", 1.0, self.global_step)

    def test_step(self, batch, batch_idx):
        note("test", len(batch[0]), self.logger is not None)
        for logger in self.loggers:
            logger.experiment.add_scalar("of_test", 1.0, batch_idx)
        self.log("test_loss", self(batch[0]).mean(), sync_dist=True)

    def configure_callbacks(self):
        return [ModelCheckpoint(monitor="val_loss/dataloader_idx_0", save_top_k=1), Noted()]

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "epoch"}]


class Data(pl.LightningDataModule):
    def setup(self, stage):
        note("data", stage.value)
        self.x = TensorDataset(torch.arange(60.0).view(20, 3) / 60)

    def train_dataloader(self):
        return DataLoader(self.x, batch_size=8)

    def val_dataloader(self):
        return [DataLoader(self.x, batch_size=10), DataLoader(self.x, batch_size=20)]

    def test_dataloader(self):
        return DataLoader(self.x, batch_size=10)


Noted: Any = noting(Callback, CALLBACK.split())
Hooked: Any = noting(Plain, MODULE.split())
