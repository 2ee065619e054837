"""One body with two heads: the kind of a point and its distance; validated on points from near and from far."""

# B batch · K class

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep

PLACES = ("near", "far")


def points(count: int, seed: int, scale: float = 1.0) -> TensorDataset:
    point_B3 = scale * torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(point_B3, (point_B3 > 0).sum(1), point_B3.norm(dim=1))


class TwoHeads(lockstep.Module):
    def __init__(self, width: int = 16, lr: float = 1e-2, batch_size: int = 16) -> None:
        super().__init__()
        self.lr, self.batch_size = lr, batch_size
        self.body = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Dropout(0.1))
        self.kind, self.distance = nn.Linear(width, 4), nn.Linear(width, 1)

    def losses(self, batch: list[Tensor]) -> dict[str, Tensor]:
        point_B3, kind_B, distance_B = batch
        body = self.body(point_B3)
        kind_loss_B = F.cross_entropy(self.kind(body), kind_B, reduction="none")
        return {"kind": kind_loss_B, "distance": F.mse_loss(self.distance(body)[:, 0], distance_B, reduction="none")}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        kind, distance = (self.mean(loss_B, log=f"train/{name}") for name, loss_B in self.losses(batch).items())
        return kind + 0.5 * distance

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        for name, loss_B in self.losses(batch).items():
            self.mean(loss_B, log=f"{self.stage}/{PLACES[dataloader_idx]}/{name}")

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.lr)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(points(101, 0), self.batch_size, shuffle=True)

    def val_dataloader(self) -> list[DataLoader]:
        return [DataLoader(points(30, 1), self.batch_size), DataLoader(points(25, 2, scale=3.0), self.batch_size)]

    def test_dataloader(self) -> list[DataLoader]:
        return [DataLoader(points(30, 3), self.batch_size), DataLoader(points(25, 4, scale=3.0), self.batch_size)]
