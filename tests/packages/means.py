"""Modules with means over the global batch: several losses, weights, a network that is not trained."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.kit.tasks import Classification

COUNT, BATCH = 22, 8  # the last batch has 6 samples, which three processes do not share evenly
SEEN: list[Tensor] = []
SEED = 2  # of a teacher


def samples() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(COUNT, width, generator=draw) for width in (4, 2)]
    return TensorDataset(*values, torch.rand(COUNT, generator=draw) * torch.tensor([0.0, 1.0]).repeat(COUNT // 2))


class Weighted(lockstep.Module):
    def __init__(self, weighted: bool = True) -> None:
        super().__init__()
        self.weighted = weighted
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def losses(self, batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        x, y, weight_B = batch
        error_BT = self.body(x) - y
        return error_BT.square().mean(1), error_BT.abs().mean(1), weight_B if self.weighted else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        SEEN.append(batch[0])
        square_B, absolute_B, weight_B = self.losses(batch)
        square = self.mean(square_B, weight_B, log=f"{self.stage}/square")
        absolute = self.mean(absolute_B, log=f"{self.stage}/absolute")
        return square + 0.5 * absolute + 0.01 * sum(p.square().sum() for p in self.body.parameters())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        square_B, absolute_B, weight_B = self.losses(batch)
        self.mean(square_B, weight_B, log=f"{self.stage}/square")
        self.mean(absolute_B, log=f"{self.stage}/absolute")

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.body.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(samples(), batch_size=BATCH)

    val_dataloader = test_dataloader = train_dataloader


class OneMean(Weighted):
    """Logs another mean, with other weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        square_B, absolute_B, weight_B = self.losses(batch)
        self.mean(absolute_B, log="train/absolute")
        self.mean(absolute_B.detach(), log="train/again")
        return 2 * self.mean(square_B, weight_B, log="train/square") - 0.5 * self.mean(absolute_B, weight_B.clone())


class Distilled(Weighted):
    """A masked autoencoder of what a teacher sees, with random masks and a batch norm in the teacher."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.teacher = lockstep.frozen(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))

    def losses(self, batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        x, _, weight_B = batch
        masked = x * (lockstep.rand(x, 4) > 0.3)
        error_BT = self.body(masked) - self.teacher(x)
        return error_BT.square().mean(1), error_BT.abs().mean(1), weight_B


class Named(Classification):
    """A task with a teacher that logs its loss by another name, and knows the run."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.teacher = lockstep.frozen(nn.Linear(144, 10))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        teacher_BK = self.teacher(batch["input"].flatten(1).float() * lockstep.rand(batch["input"], 144))
        loss_B = super().loss(output + teacher_BK / self.trainer.max_epochs, batch)
        self.mean(loss_B, log=f"{self.stage}/again")
        return loss_B

    def on_train_epoch_end(self) -> None:
        self.log("train/epoch", float(self.current_epoch + self.global_step))


class Configured(Classification):
    """Its `configure_model` changes what it computes."""

    share = 0.0

    def configure_model(self) -> None:
        super().configure_model()
        self.share = 0.5

    def outputs(self, net: Any, batch: Any) -> Tensor:
        return super().outputs(net, batch) * self.share


class ByHand(Classification):
    """Steps two optimizers itself; the second one with a rate of 0."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.zero_grad()
        self.manual_backward(self.mean_loss(self(batch), batch))
        for optimizer in self.optimizers():
            optimizer.step()
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), {"optimizer": torch.optim.SGD(self.parameters(), 0.0)}]


class Odd(Classification):
    """Inputs of a metric that it has not."""

    def inputs_by_metric(self, output: Tensor, batch: Any) -> Any:
        return {"mean": (output,)}


class Digits(lockstep.Module):
    """On Lockstep's data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(32 * 32, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss_B = nn.functional.cross_entropy(self.net(x), y, reduction="none")
        self.log("train_loss", loss_B.mean())
        return self.mean(loss_B, (y > 3).float(), log="train/loss") + self.mean(loss_B)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss_B = nn.functional.cross_entropy(self.net(x), y, reduction="none")
        self.log("val_loss", loss_B.mean())
        self.mean(loss_B, log="val/loss")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
