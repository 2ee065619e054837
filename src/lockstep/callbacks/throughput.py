"""Training speed in images per second, over all processes, and the share of it that went to waiting for data; validation
is left out."""

import time
from typing import Any

import lightning.pytorch as pl
import torch

from lockstep.reporting.recorder import SPEED
from lockstep.training.steps import completes_step, has_row


def waited_s(trainer: pl.Trainer) -> float:
    return float(getattr(trainer.datamodule, "waited_s", 0.0))  # type: ignore[attr-defined]


class Throughput(pl.Callback):
    """Measures windows of `log_every_n_steps` steps. The first window, which holds warm-up and compiling, counts alone
    only when there is no other."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, float, float]] = []  # images, seconds, seconds of them waiting for data
        self.waited_s = 0.0
        self.first_step_s: float | None = None  # with compiling, where the network is compiled
        self.images = 0
        self.began_s: float | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.began_s is None:
            self.began_s, self.waited_s = time.perf_counter(), waited_s(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.images += len(batch[1]) * trainer.world_size
        if self.first_step_s is None and self.began_s is not None:
            self.first_step_s = time.perf_counter() - self.began_s
        if completes_step(trainer, batch_idx) and has_row(trainer, trainer.global_step):
            self.close(trainer)
            self.began_s = time.perf_counter()  # waiting for the next batch counts
            images, seconds, _ = self.windows[-1]
            pl_module.log("train/images_per_s", images / seconds, prog_bar=True)

    def close(self, trainer: pl.Trainer) -> None:
        if self.began_s is not None and self.images:
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize()  # SYNC: once every log_every_n_steps
            waited = waited_s(trainer)
            self.windows.append((self.images, time.perf_counter() - self.began_s, waited - self.waited_s))
            self.waited_s = waited
        self.images, self.began_s = 0, None

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.close(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.close(trainer)

    def report_figures(self) -> dict[str, float | None]:
        """Over the whole run; reporting/recorder.py asks for them."""
        images, seconds, waited = (
            sum(column) for column in zip(*(self.windows[1:] or self.windows or [(0, 0, 0)]), strict=True)
        )
        shares = (images / seconds, waited / seconds) if seconds else (None, None)
        return dict(zip(SPEED, (*shares, self.first_step_s), strict=True))
