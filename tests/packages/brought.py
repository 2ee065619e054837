"""DataLoaders that people bring, by what is special about them; and a LightningModule that notes what it gets."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

Row = tuple[int, float]


class Plain(Dataset):
    """23 samples of their index and nothing else."""

    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        return index, self.number(index)

    def number(self, index: int) -> float:
        return index / 2


class Draws(Plain):
    """A random number with each sample, of four generators."""

    def __init__(self, count: int = 23) -> None:
        super().__init__(count)
        self.own = np.random.default_rng(1)

    def number(self, index: int) -> float:
        return random.random() + float(np.random.rand()) + float(torch.rand(())) + self.own.random()


class Together(Draws):
    """Reads several samples at once, as those of Hugging Face."""

    def __getitems__(self, indices: list[int]) -> list[Row]:
        return [self[index] for index in indices]


class Numbers(Together):
    def number(self, index: int) -> float:
        return index / 2


class OfStrings(Draws):
    def __getitem__(self, key: str) -> Row:
        return super().__getitem__(int(key))


class Python(Sampler):
    """Draws each element when it is due, from Python's generator."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(20):
            yield random.randrange(23)

    def __len__(self) -> int:
        return 20


class Own(Sampler):
    """With a generator and an epoch of its own."""

    def __init__(self) -> None:
        self.generator, self.epoch = torch.Generator(), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(23, generator=self.generator).tolist()
        return iter(order[self.epoch :] + order[: self.epoch])

    def __len__(self) -> int:
        return 23


class Named(Sampler):
    def __iter__(self) -> Iterator[str]:
        return map(str, torch.randperm(23).tolist())

    def __len__(self) -> int:
        return 23


class Ragged(Sampler):
    """A batch sampler whose batches have several sizes, one of them a single sample."""

    def __init__(self, sampler: Any = range(23)) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        left = iter([*self.sampler])
        for size in (5, 1, 8, 2, 7):
            yield [next(left) for _ in range(size)]

    def __len__(self) -> int:
        return 5


class Endless(Sampler):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(23).tolist()


def pads(samples: list[Row]) -> torch.Tensor:
    """As wide as the largest index of the batch."""
    padded = torch.zeros(len(samples), 2 + max(index for index, _ in samples), dtype=torch.double)
    padded[:, :2] = torch.tensor(samples, dtype=torch.double)
    return padded


def masks(samples: list[Row]) -> list[tuple[int, float, float]]:
    """Draws, and empties the list that it was given."""
    found = [(*sample, random.random()) for sample in samples]
    samples.clear()
    return found


WEIGHTS = [1.0] * 20 + [30.0] * 3
KEYS = {"prefetch_factor": 3, "timeout": 60}
LOADERS: dict[str, Callable[[], DataLoader]] = {
    "sequential": lambda: DataLoader(Plain(), batch_size=6),
    "sequential, drawing": lambda: DataLoader(Draws(), batch_size=6),
    "shuffled": lambda: DataLoader(Draws(), batch_size=6, shuffle=True),
    "shuffled, dropping": lambda: DataLoader(Draws(), batch_size=6, shuffle=True, drop_last=True),
    "no batch size": lambda: DataLoader(Draws(5)),
    "a batch larger than the data": lambda: DataLoader(Draws(5), batch_size=64),
    "a list": lambda: DataLoader([(i, 0.5) for i in range(23)], batch_size=6, shuffle=True),
    "weighted": lambda: DataLoader(Draws(), batch_size=6, sampler=WeightedRandomSampler(WEIGHTS, 29)),
    "with replacement": lambda: DataLoader(Draws(), batch_size=6, sampler=RandomSampler(range(23), True, 17)),
    "with a generator": lambda: DataLoader(Draws(), batch_size=6, sampler=SubsetRandomSampler(range(3, 20), torch.Generator())),
    "subset": lambda: DataLoader(Subset(Draws(), range(4, 21)), batch_size=6, shuffle=True),
    "several at once": lambda: DataLoader(Numbers(), batch_size=6, shuffle=True),
    "several at once, drawing": lambda: DataLoader(Together(), batch_size=6, shuffle=True),
    "strings": lambda: DataLoader(OfStrings(), batch_size=6, sampler=Named()),
    "own sampler": lambda: DataLoader(Draws(), batch_size=6, sampler=Own()),
    "own sampler, lazy": lambda: DataLoader(Draws(), batch_size=6, sampler=Python()),
    "own sampler, a list": lambda: DataLoader(Draws(), batch_size=6, sampler=[3, 1, 4, 1, 5, 9, 2]),
    "batch sampler": lambda: DataLoader(Draws(), batch_sampler=BatchSampler(SequentialSampler(range(23)), 6, True)),
    "batch sampler, shuffled": lambda: DataLoader(Draws(), batch_sampler=BatchSampler(RandomSampler(range(23)), 6, False)),
    "own batch sampler": lambda: DataLoader(Draws(), batch_sampler=Ragged()),
    "own batch sampler, shuffled": lambda: DataLoader(Draws(), batch_sampler=Ragged(RandomSampler(range(23)))),
    "distributed": lambda: DataLoader(Draws(), batch_size=6, sampler=DistributedSampler(range(23), 4, 1)),
    "own batch sampler, distributed": lambda: DataLoader(Draws(), batch_sampler=Ragged(DistributedSampler(range(23), 2, 1))),
    "padding": lambda: DataLoader(Draws(), batch_size=6, shuffle=True, collate_fn=pads),
    "workers": lambda: DataLoader(Draws(), batch_size=6, shuffle=True, num_workers=2, **KEYS),
    "workers that stay": lambda: DataLoader(Together(), batch_size=6, sampler=Own(), num_workers=1, persistent_workers=True),
    "spawned": lambda: DataLoader(Draws(), batch_size=6, shuffle=True, num_workers=1, multiprocessing_context="spawn"),
}  # fmt: skip


# --- In whole runs ---


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Row]:
        for index in range(23):
            yield index, random.random()


class Sharded(Stream):
    """Each process reads samples of its own, as far as it knows of others."""

    def __iter__(self) -> Iterator[Row]:
        rank, world = (
            (torch.distributed.get_rank(), torch.distributed.get_world_size())
            if torch.distributed.is_initialized()
            else (0, 1)
        )
        return (row for row in super().__iter__() if row[0] % world == rank)


class Finished:
    """Batches that cannot be taken apart."""

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for place in range(4):
            yield [torch.arange(6 * place, 6 * place + 6), torch.rand(6)]

    def __len__(self) -> int:
        return 4


def shuffled() -> DataLoader:
    return DataLoader(Draws(), batch_size=6, shuffle=True)


def short() -> DataLoader:
    return DataLoader(Draws(11), batch_size=6, sampler=WeightedRandomSampler([1.0] * 11, 11))


DIVIDED: dict[str, Callable[[], Any]] = {
    **LOADERS,
    "a stream": lambda: DataLoader(Stream(), batch_size=6),
    "a stream, with workers": lambda: DataLoader(Stream(), batch_size=6, num_workers=2, drop_last=True),
    "five samples": lambda: DataLoader(Draws(5), batch_size=5, shuffle=True),
}
TOGETHER: dict[str, Callable[[], Any]] = {
    mode: lambda mode=mode: CombinedLoader([shuffled(), short()], mode)  # type: ignore[misc]
    for mode in ("min_size", "max_size", "max_size_cycle")
}
ALONE: dict[str, Callable[[], Any]] = {
    "a stream that divides itself": lambda: DataLoader(Sharded(), batch_size=3),
    "batch_size=None": lambda: DataLoader(
        [torch.tensor([[i, i], [i, 2.0]]) for i in range(9)], batch_size=None, shuffle=True
    ),
    "no DataLoader": Finished,
}
EVERY = DIVIDED | TOGETHER | ALONE


class Data(pl.LightningDataModule):
    def __init__(self, loader: str) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return EVERY[self.loader]()


class Sees(pl.LightningModule):
    """Notes each row that it learns from, and where: epoch, step, whether its weight is above 0."""

    def __init__(self, notes: str) -> None:
        super().__init__()
        self.notes, self.layer, self.drop = notes, nn.Linear(3, 1), nn.Dropout(0.3)

    @staticmethod
    def rows(batch: Any) -> torch.Tensor:
        """Index and number of each sample, from whatever a loader gives."""
        if isinstance(batch, torch.Tensor):
            return batch[:, :2].float()
        if isinstance(batch[0], tuple):
            return torch.tensor(batch)[:, :2]
        return torch.stack([value.float() for value in batch], 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loaders = self.trainer.strategy.loaders_of(batch_idx)
        together = isinstance(self.trainer.train_dataloader, list | tuple)
        parts = [self.rows(each) for each in (batch if together else [batch]) if each is not None]
        with Path(f"{self.notes}-{self.global_rank}").open("a") as file:
            for loader, rows in zip(loaders, parts, strict=True):
                for index, number in rows.tolist() if loader.batch_info[batch_idx].weight else ():
                    file.write(f"{self.current_epoch} {self.global_step} {index:g} {number:.6f}\n")
        rows = torch.cat(parts)
        x = torch.cat([rows, rows[:, :1] * rows[:, 1:]], 1) / 10
        return nn.functional.mse_loss(self.layer(self.drop(x))[:, 0], rows[:, 1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)
