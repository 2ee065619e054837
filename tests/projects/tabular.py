"""Which customers leave? Numbers and categories; one in ten does."""

# B batch · N number · C category

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from torchmetrics.classification import BinaryAUROC

import lockstep

LEVELS = (5, 3)


def customers(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    number_BN = torch.randn(count, 4, generator=draw)
    category_BC = torch.stack([torch.randint(levels, (count,), generator=draw) for levels in LEVELS], 1)
    leaves_B = number_BN[:, 0] - number_BN[:, 1] + (category_BC[:, 0] == 2).float() > 2
    return TensorDataset(number_BN, category_BC, leaves_B.float())


class Customers(pl.LightningDataModule):
    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.train, self.val, self.test = customers(203, 0), customers(90, 1), customers(90, 2)

    def train_dataloader(self) -> DataLoader:
        leaves_B = self.train.tensors[2]
        weight_B = torch.where(leaves_B == 1, 1 / leaves_B.mean(), 1 / (1 - leaves_B.mean()))
        return DataLoader(self.train, self.batch_size, sampler=WeightedRandomSampler(weight_B.tolist(), len(weight_B)))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, self.batch_size)


class Churn(lockstep.Module):
    def __init__(self, width: int = 16, lr: float = 1e-2) -> None:
        super().__init__()
        self.lr = lr
        self.embed = nn.ModuleList(nn.Embedding(levels, 3) for levels in LEVELS)
        self.net = nn.Sequential(nn.Linear(4 + 3 * len(LEVELS), width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1))
        self.auroc = BinaryAUROC()

    def forward(self, number_BN: Tensor, category_BC: Tensor) -> Tensor:
        embedded = [embed(category_B) for embed, category_B in zip(self.embed, category_BC.T, strict=True)]
        return self.net(torch.cat([number_BN, *embedded], 1))[:, 0]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        number_BN, category_BC, leaves_B = batch
        loss_B = F.binary_cross_entropy_with_logits(self(number_BN, category_BC), leaves_B, reduction="none")
        return self.mean(loss_B, log="train/loss")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        number_BN, category_BC, leaves_B = batch
        self.auroc.update(self(number_BN, category_BC), leaves_B.int())
        self.log(f"{self.stage}/auroc", self.auroc)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.lr)
