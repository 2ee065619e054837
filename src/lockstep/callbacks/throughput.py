"""Training speed in images per second, over all processes; validation is left out."""

import time
from typing import Any

import lightning.pytorch as pl
import torch

from lockstep.pace import completes_step, has_row


class Throughput(pl.Callback):
    """Measures windows of `log_every_n_steps` steps. The first window, which holds warm-up and compiling, counts alone
    only when there is no other."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, float]] = []  # images, seconds
        self.images = 0
        self.began_s: float | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.began_s is None:
            self.began_s = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.images += len(batch[1]) * trainer.world_size
        if completes_step(trainer, batch_idx) and has_row(trainer, trainer.global_step):
            self.close(trainer)
            self.began_s = time.perf_counter()  # waiting for the next batch counts
            images, seconds = self.windows[-1]
            pl_module.log("train/images_per_s", images / seconds, prog_bar=True)

    def close(self, trainer: pl.Trainer) -> None:
        if self.began_s is not None and self.images:
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize()  # SYNC: once every log_every_n_steps
            self.windows.append((self.images, time.perf_counter() - self.began_s))
        self.images, self.began_s = 0, None

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.close(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.close(trainer)

    @property
    def images_per_s(self) -> float | None:
        """Over the whole run."""
        counted = self.windows[1:] or self.windows
        seconds = sum(s for _, s in counted)
        return sum(i for i, _ in counted) / seconds if seconds else None
