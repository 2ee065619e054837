"""Houses with prices near 1,500, a network for them, and modules with hooks of their own, for tests/test_numbers.py."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lockstep import Arrays, DataSet
from lockstep.kit.tasks import Regression


class Houses(DataSet):
    """The price grows with the size; `odd` sets one value: of which column of which sample, and what."""

    unit = "houses"

    def __init__(self, *, target: str = "price", odd: list | None = None) -> None:
        size_N = torch.linspace(-1, 1, 60)
        arrays = {"input": torch.stack([size_N, size_N**2], 1), "target": 1500 + 20 * size_N}
        if odd:
            name, place, value = odd
            arrays[name][place] = float(value)
        self.train = Arrays(**{name: each.numpy() for name, each in arrays.items()})
        self.test = Arrays(**{name: each.numpy()[15:45] for name, each in arrays.items()})
        self.metadata = {"targets": [target]}


class Layers(nn.Module):
    """The last one's bias starts near the prices, because the runs are short."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(2, 8), nn.Tanh()), nn.Linear(8, outputs)
        nn.init.constant_(self.head.bias, 1500.0)

    def forward(self, x):
        return self.head(self.body(x))


class HeadFirst(nn.Module):
    """Registers its head before its body, which is then taken for the last layer."""

    def __init__(self, *, num_classes: int) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(8, num_classes), nn.Linear(2, 8)

    def forward(self, x):
        return self.head(self.body(x))


class Dense(nn.Sequential):
    """fsdp gathers each composite member in bf16."""

    def __init__(self, *, num_classes: int) -> None:
        super().__init__(nn.Sequential(Layers(num_classes)))


class Renamed(Regression):
    """A task whose table has a column of Lockstep's."""

    def predictions(self, output):
        return {"error": output[:, 0]}


class Module(pl.LightningModule):
    """Logs without a stage, with two losses, and watches `val_f1`."""

    def __init__(self, column: str = "price", hook: str = "", folder: str | None = None):
        super().__init__()
        self.net, self.column, self.hook, self.folder = nn.Linear(2, 1), column, hook, folder

    def loss(self, batch):
        return (self.net(batch[0])[:, 0] - batch[1] / 1500).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log_dict({"return": loss * 2, "train/loss_a": loss}, on_step=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log_dict({"val_loss": self.loss(batch), "val_f1": self.current_epoch / 2}, sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log_dict({"test_loss": self.loss(batch), "test_f1": 0.75}, sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return {self.column: self.net(batch[0])[:, 0]}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    def configure_callbacks(self):
        return [ModelCheckpoint(dirpath=self.folder or None, save_last=True)] if self.folder is not None else []

    def on_save_checkpoint(self, checkpoint):
        """As libraries do: objects among the hyperparameters, or under a key of their own."""
        if self.hook == "hyperparameters":
            checkpoint["hyper_parameters"] = {"width": 3, "loss": nn.MSELoss()}
        elif self.hook and (self.hook == "all" or self.global_rank == 0):
            checkpoint["mine"] = nn.MSELoss()
