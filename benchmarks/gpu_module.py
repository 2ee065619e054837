"""A typical user's LightningModule with its own DataLoaders. Run as a script, it trains with a plain Trainer."""

import sys
import time
from typing import Any

import lightning.pytorch as pl
import timm
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    """Noise images in memory, of ten classes with different brightness; each access adds a random offset."""

    def __init__(self, count: int, pixels: int) -> None:
        self.images = torch.randn(count, 3, pixels, pixels, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % 10
        return self.images[index] + 0.1 * label + 0.05 * torch.randn(3, 1, 1), label


class Brought(pl.LightningModule):
    """Prints the training speed in images per second from step `first` to step `last`."""

    def __init__(
        self, name: str, pixels: int, batch: int, count: int, first: int, last: int, workers: int = 2, drop: float = 0.0
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = timm.create_model(name, num_classes=10, drop_rate=drop)
        self.images, self.began_s = Images(count, pixels), 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        first, last = self.hparams["first"], self.hparams["last"]
        if self.global_step in (first, last):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now_s = time.perf_counter()
            if self.global_step == last:
                print(f"RATE {(last - first) * self.hparams['batch'] / (now_s - self.began_s):,.0f}", flush=True)
            self.began_s = now_s

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def loader(self, trains: bool) -> DataLoader:
        workers = self.hparams["workers"]
        options = {"num_workers": workers, "persistent_workers": workers > 0, "pin_memory": True}
        return DataLoader(self.images, self.hparams["batch"], shuffle=trains, drop_last=trains, **options)

    def train_dataloader(self) -> DataLoader:
        return self.loader(trains=True)

    def val_dataloader(self) -> DataLoader:
        return self.loader(trains=False)

    def test_dataloader(self) -> DataLoader:
        return self.loader(trains=False)


if __name__ == "__main__":
    pl.seed_everything(0)
    pixels, batch, count, first, last, workers = map(int, sys.argv[2:])
    trainer = pl.Trainer(
        max_steps=last + 1, precision="bf16-mixed", limit_val_batches=0, num_sanity_val_steps=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Brought(sys.argv[1], pixels, batch, count, first, last, workers, drop=0.1))
