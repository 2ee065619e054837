"""A forecast from an endless stream that is read in order."""

# B batch · T time

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lockstep

LENGTH = 8


class Waves(IterableDataset):
    """Windows of a noisy wave whose period drifts."""

    def __iter__(self) -> Iterator[Tensor]:
        draw, phase = torch.Generator().manual_seed(0), 0.0
        while True:
            period = 10 + 5 * torch.rand((), generator=draw).item()
            time_T = phase + torch.arange(LENGTH + 1) * 2 * math.pi / period
            phase = time_T[-1].item() % (2 * math.pi)
            yield time_T.sin() + 0.1 * torch.randn(LENGTH + 1, generator=draw)


class Forecast(lockstep.Module):
    def __init__(self, width: int = 16, lr: float = 1e-2, batch_size: int = 16) -> None:
        super().__init__()
        self.lr, self.batch_size = lr, batch_size
        self.net = nn.Sequential(nn.Linear(LENGTH, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1))

    def training_step(self, wave_BT: Tensor, batch_idx: int) -> Tensor:
        error_B = self.net(wave_BT[:, :-1])[:, 0] - wave_BT[:, -1]
        return self.mean(error_B.square(), log="train/loss")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.lr)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Waves(), self.batch_size)
