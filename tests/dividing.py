"""Several processes in one, which take turns: what each gets of a DataLoader."""

from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader

from lockstep.data.standard import Division, StandardLoader
from lockstep.data.streams import StreamLoader, wrap_loader

SEED, EPOCH = 7, 3
DIVISIONS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]


def rows(batch: Any) -> list[tuple[float, ...]]:
    """Of a batch, one for each sample."""
    if isinstance(batch, torch.Tensor):
        return [tuple(row) for row in batch[:, :2].tolist()]
    return list(batch) if isinstance(batch[0], tuple) else list(zip(*(value.tolist() for value in batch), strict=True))


class Process:
    """One of several, at a place of an epoch."""

    def __init__(self, given: DataLoader, rank: int, world: int, accumulate: int, **more: Any) -> None:
        self.done, self.epoch = 0, EPOCH
        division = {"seed": SEED, "rank": rank, "world": world, "accumulate": accumulate, **more}
        loader = wrap_loader(given, Division(**division, position=lambda: (self.epoch, self.done)))
        assert isinstance(loader, StandardLoader | StreamLoader)
        self.loader = loader

    def epoch_from(self, done: int = 0) -> list[tuple[float, list[tuple[float, ...]]]]:
        """Weight and rows of each micro-batch, as the Trainer takes them."""
        found, self.done = [], done
        for batch in self.loader:
            found.append((self.loader.batch_info[self.done].weight, rows(batch)))
            self.done += 1
        return found


def joined(per_rank: list[list], accumulate: int, contiguous: bool) -> list[list[tuple[float, ...]]]:
    """The global batches of the micro-batches of all processes; those with weight 0 belong to none."""
    assert len({len(found) for found in per_rank}) == 1
    steps = []
    for step in range(0, len(per_rank[0]), accumulate):
        mine = [found[step : step + accumulate] for found in per_rank]
        ordered = chain(*mine) if contiguous else chain(*zip(*mine, strict=True))
        steps.append([row for weight, share in ordered for row in share if weight])
    return steps


def indices(batches: list[list[tuple[float, ...]]]) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


def digests(given: DataLoader, rank: int = 0) -> list[str]:
    """Of the micro-batches of one of two processes."""
    process = Process(given, rank, 2, 1)
    found = []
    for _ in process.loader:
        found.append(process.loader.batch_info[process.done].digest)
        process.done += 1
    return found
