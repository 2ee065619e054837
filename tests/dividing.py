"""Several processes in one, which take turns: what each gets of a DataLoader."""

from itertools import chain
from typing import Any

import pytest
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

    def __init__(
        self, given: DataLoader, rank: int = 0, world: int = 1, accumulate: int = 1, epoch: int = EPOCH, **more: Any
    ) -> None:
        self.done, self.epoch = 0, epoch
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

    def rows_from(self, done: int = 0) -> list[tuple[float, ...]]:
        """Rows of all micro-batches."""
        return [row for _, share in self.epoch_from(done) for row in share]


def joined(per_rank: list[list], accumulate: int, contiguous: bool) -> list[list[tuple[float, ...]]]:
    """The global batches of the micro-batches of all processes. Checks their sizes and weights; weight 0 is no part."""
    assert len({len(micros) for micros in per_rank}) == 1
    steps = []
    for step in range(0, len(per_rank[0]), accumulate):
        mine = [micros[step : step + accumulate] for micros in per_rank]
        shares = [*chain(*mine)] if contiguous else [*chain(*zip(*mine, strict=True))]
        parts = [share for weight, share in shares if weight]
        batch = [row for share in parts for row in share]
        assert {len(share) for share in parts} <= {len(batch) // len(parts), -(-len(batch) // len(parts))}
        for weight, share in shares:  # the mean over all shares is that over the global batch
            assert weight == pytest.approx(len(share) * len(shares) / len(batch)) if weight else len(share) <= 2
        assert mine[0][0][0] > 0  # rank 0, which logs, has a sample
        steps.append(batch)
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
