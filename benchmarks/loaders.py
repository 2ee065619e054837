"""Measures a user's DataLoader: read by torch and by Lockstep, and in training with Lightning alone and with Lockstep.

python benchmarks/loaders.py [--images 4096] [--turns 7] [--training]

Prints images/s, measured in turns; read the ratios. --training trains a two-layer convolutional network (32 px) or a linear one (28 px),
without validation: Lightning's Trainer and a run of Lockstep, each with its defaults.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import measuring
import numpy as np
import torch
from images import JPEGS, SIDE, Photos, write_jpeg
from measuring import CPU, in_turns, ratio, show, start_job, table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from torchvision.transforms import v2

from lockstep import build
from lockstep.config.settings import Settings
from lockstep.data.standard import Division
from lockstep.data.streams import wrap_loader
from lockstep.machine import process

WARM = 3  # batches before the clock starts
Case = tuple[Any, dict[str, Any], int]  # data, options of the loader, side length of the images


class Streamed(IterableDataset[Any]):
    def __init__(self, pictures: Photos) -> None:
        self.pictures = pictures

    def __iter__(self) -> Iterator[Any]:
        return map(self.pictures.__getitem__, range(len(self.pictures)))


def cases(count: int, folder: Path) -> dict[str, Case]:
    write_jpeg(folder / "x.jpg", *JPEGS[0])
    small = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    tensors = TensorDataset(torch.rand(8 * count, 1, 28, 28), torch.zeros(8 * count, dtype=torch.long))
    finished = [v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    crops = Photos(small, count, v2.Compose([v2.RandomCrop(32, padding=4), *finished]))
    files = Photos(folder / "x.jpg", count // 2, v2.Compose([v2.RandomResizedCrop(SIDE), *finished]))
    weighted = WeightedRandomSampler([1.0] * count, count)
    return {
        "tensors of 28 px": (tensors, {"shuffle": True}, 28),
        "32 px, crop and flip": (crops, {"shuffle": True}, 32),
        "the same, weighted": (crops, {"sampler": weighted}, 32),
        "the same, a stream": (Streamed(crops), {}, 32),
        "224 px, crop and flip": (files, {"shuffle": True}, SIDE),
    }


def reading(loader: Iterable[Any]) -> float:
    batches, read = iter(loader), 0
    for _ in range(WARM):
        next(batches)
    began_s = time.perf_counter()
    for images, _ in batches:
        read += len(images)
    return read / (time.perf_counter() - began_s)


# --- in training ---


class Net(pl.LightningModule):
    def __init__(self, side: int, loader: DataLoader[Any]) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 16, 3, 2), nn.ReLU()]
        self.net = nn.Sequential(*(convolutions if side > 28 else []), nn.Flatten(), nn.LazyLinear(10))
        self.net(torch.zeros(2, 3 if side > 28 else 1, side, side))
        self.loader = loader

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Clock(pl.Callback):
    began_s = seconds = 0.0
    read = 0

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM:
            self.began_s, self.read = time.perf_counter(), 0
        self.read += len(batch[0])

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self.began_s


def lightning_alone(side: int, loader: DataLoader[Any]) -> float:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, measuring.silenced():
        trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[clock], default_root_dir=folder)
        trainer.fit(Net(side, loader))
    return clock.read / clock.seconds


def lockstep(side: int, loader: DataLoader[Any]) -> float:
    clock, module = Clock(), Net(side, loader)

    def job(settings: Settings, data: Any) -> None:
        with patch.object(build, "create_module", lambda *_, **__: module):
            loaders, trainer = measuring.ready(settings, data)
        torch.set_num_threads(1)
        trainer.callbacks.append(clock)
        trainer.fit(loaders.module, datamodule=loaders.data)

    with tempfile.TemporaryDirectory() as folder, measuring.silenced():
        named = [
            "task=lightning_module",
            "task._target_=lockstep.training.module.Module",
            "data=none",
            "task.monitor=null",
        ]
        start_job(job, [*CPU, *named, f"runs_dir={folder}", "trainer.max_epochs=1", "strategy=single"])
    return clock.read / clock.seconds


def rows(args: argparse.Namespace, folder: Path) -> Iterator[list[str]]:
    for case, (data, options, side) in cases(args.images, folder).items():
        for workers in (0, 1) if isinstance(data, IterableDataset) else (0, 2):
            plain: DataLoader[Any] = DataLoader(data, batch_size=64, num_workers=workers, **options)
            if args.training:
                ways = {"torch": partial(lightning_alone, side, plain), "Lockstep": partial(lockstep, side, plain)}
            else:
                ways = {
                    "torch": partial(reading, plain),
                    "Lockstep": partial(reading, wrap_loader(plain, Division(seed=0))),
                }
            results = in_turns(ways, args.turns, warm_up=1)
            rates = [f"{statistics.median(values):,.0f}" for values in results.values()]
            yield [case, str(workers), *rates, f"{ratio(results['Lockstep'], results['torch']):.3f}"]


def main() -> None:
    parser = measuring.parser(__doc__)
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--training", action="store_true", help="measure training, compared with Lightning alone")
    args = parser.parse_args()
    process.is_command = True
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        alone = "Lightning alone" if args.training else "torch"
        show(table(["images", "workers", f"{alone}, images/s", "Lockstep", "ratio"], [*rows(args, Path(name))]))


if __name__ == "__main__":
    main()
