"""Who gets which samples at which step: pure arithmetic over (seed, epoch, step), the same for every world.

Nothing is drawn, stored or sent. A permutation of n samples is a bijection that is computed where it is needed, so a
process holds the indices of a few thousand samples at a time, not n of them, and resuming at a step is an addition.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lockstep.data.dataset import DataSet
from lockstep.data.samples import Indices
from lockstep.errors import UserError

FILLER = -1  # stands where a rank has no sample left in an evaluation's last batch
ROUNDS = (
    16  # of the Feistel network: with 8, orders of 5 samples are not yet equally frequent (chi2/df 5.8; with 16, 0.9)
)
BLOCK = 65536  # samples whose indices are computed at once: 0.1 us a sample, against 2 us when computed 64 at a time
FIRST_BLOCK = 1024  # of an epoch; then twice as many, and again: the first batch takes 0.5 ms, with a whole block 20 ms
SPLIT_SEED = 0x5EED  # of the validation split: the same images whatever `seed` is


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): every bit of the output depends on every bit of the input."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Round keys of the permutation that belongs to (seed, epoch)."""
    start = mix(np.array([seed], np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(epoch))
    return mix(start + np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def permute(positions: Indices, n: int, seed: int, epoch: int) -> Indices:
    """Where a pseudo-random permutation of 0..n-1 sends `positions`.

    A Feistel network over a grid of a x b >= n cells, whose halves are added modulo a and b (Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002); what lands outside of 0..n-1 is sent on until it is inside.
    """
    a = max(1, int(np.ceil(np.sqrt(n))))
    b = -(-n // a)
    round_keys = keys(seed, epoch)
    x = positions.astype(np.uint64)
    outside = np.ones(len(x), bool)
    while outside.any():
        left, right = np.divmod(x[outside], np.uint64(b))
        for i in range(0, ROUNDS, 2):
            left = (left + mix(right ^ round_keys[i]) % np.uint64(a)) % np.uint64(a)
            right = (right + mix(left ^ round_keys[i + 1]) % np.uint64(b)) % np.uint64(b)
        x[outside] = left * np.uint64(b) + right
        outside = x >= np.uint64(n)
    return x.astype(np.int64)


@dataclass(frozen=True)
class Split:
    """A fixed part of a data set: `count` samples from `first` on in the split's own order, or in the file's."""

    total: int
    first: int
    count: int
    shuffled: bool = True

    def indices(self, positions: Indices) -> Indices:
        """Indices into the data set of the split's samples at `positions`."""
        places = positions + self.first
        return permute(places, self.total, SPLIT_SEED, 0) if self.shuffled else places


def val_count(train: int, fraction: float) -> int:
    """How many of `train` samples are kept for validation: at least one."""
    return max(1, round(train * fraction))


def splits(
    dataset: DataSet, *, batch_size: int, val_fraction: float, limit_train: int | None
) -> tuple[Split, Split, Split]:
    """What is trained on, validated on and tested on. Raises UserError: the global batch is larger than the first."""
    total = len(dataset.train)
    val = 0 if dataset.val is not None else val_count(total, val_fraction)
    train = Split(total, val, min(total - val, limit_train or total))
    if batch_size > train.count:
        raise UserError(
            f"data.batch_size={batch_size} is more than the {train.count} training {dataset.unit} ({dataset.source}). Type data.batch_size={train.count} or less."
        )
    held_out = Split(total, 0, val) if dataset.val is None else whole(len(dataset.val))
    return train, held_out, whole(len(dataset.test))


def whole(count: int) -> Split:
    return Split(count, 0, count, shuffled=False)


class TrainBatches:
    """Micro-batches of one rank; those of all ranks and accumulation steps together are the global batches.

    A sampler for torch's DataLoader: `DataLoader(data, sampler=TrainBatches(...), batch_size=None)` for data that is
    indexed by an array, or `batch_sampler=` for a map-style data set. Samples that do not fill a global batch are left
    out at the end of an epoch; each epoch leaves out others.
    """

    def __init__(
        self, split: Split, *, batch: int, seed: int, rank: int = 0, world: int = 1, accumulate: int = 1
    ) -> None:
        if batch % (world * accumulate):
            raise ValueError(
                f"a global batch of {batch} cannot be divided by {world} processes x {accumulate} micro-batches"
            )
        self.split, self.batch, self.seed = split, batch, seed
        self.rank, self.world, self.accumulate = rank, world, accumulate
        self.epoch = 0
        self.start = 0

    def __len__(self) -> int:
        return self.split.count // self.batch * self.accumulate

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer before each epoch."""
        self.epoch = epoch

    def resume(self, epoch: int, micro_batches: int) -> None:
        """Lets the next iteration begin in `epoch` after so many micro-batches."""
        self.epoch, self.start = epoch, micro_batches

    def __iter__(self) -> Iterator[Indices]:
        first, self.start = self.start, 0
        share = self.batch // (self.world * self.accumulate)
        ahead = FIRST_BLOCK
        while first < len(self):
            micro = np.arange(first, min(first + max(1, ahead // share), len(self)))
            starts = (micro * self.world + self.rank) * share
            order = (starts[:, None] + np.arange(share)).ravel()
            samples = self.split.indices(permute(order, self.split.count, self.seed, self.epoch))
            yield from samples.reshape(-1, share)
            first, ahead = first + len(micro), min(2 * ahead, BLOCK)


class EvalBatches:
    """Every sample of a split once over all ranks; every rank has the same number of batches, of the same size.

    Strategies that communicate in forward (fsdp; ddp with buffers) would wait for a rank that ran out. So places
    without a sample hold FILLER, which the data set turns into a label that no metric counts.
    """

    def __init__(self, split: Split, *, batch: int, rank: int = 0, world: int = 1) -> None:
        self.split, self.rank, self.world = split, rank, world
        self.share = -(-min(batch, split.count) // world)

    def __len__(self) -> int:
        return -(-self.split.count // (self.share * self.world))

    def __iter__(self) -> Iterator[Indices]:
        for step in range(len(self)):
            positions = (step * self.world + self.rank) * self.share + np.arange(self.share)
            inside = positions < self.split.count
            samples = np.full(self.share, FILLER, np.int64)
            samples[inside] = self.split.indices(positions[inside])
            yield samples


class EvalShares:
    """Every sample of a split once over all ranks, without fillers: for steps that know nothing of them.

    Global batches are the same for every number of ranks, whose shares of one differ by a sample at most. None is empty: a
    remainder of fewer samples than ranks joins the batch before it.
    """

    def __init__(self, split: Split, *, batch: int, rank: int = 0, world: int = 1) -> None:
        if split.count < world:
            raise ValueError(f"{split.count} samples cannot be shared by {world} processes")
        self.split, self.rank, self.world = split, rank, world
        self.bounds = [*range(0, split.count, max(batch, world)), split.count]
        if len(self.bounds) > 2 and self.bounds[-1] - self.bounds[-2] < world:
            del self.bounds[-2]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[Indices]:
        for first, end in pairwise(self.bounds):
            begin, stop = (first + (end - first) * rank // self.world for rank in (self.rank, self.rank + 1))
            yield self.split.indices(np.arange(begin, stop))


Sampler = TrainBatches | EvalBatches | EvalShares
