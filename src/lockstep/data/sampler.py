"""Which rank gets which samples at which step, for any world size: pure arithmetic on (seed, epoch, step)."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Nothing is drawn, stored or communicated. A permutation of n samples is a bijection that is evaluated only as needed:
# a process holds the indices of a few thousand samples at a time instead of n, and resuming at a step is an addition.
# This module does not import torch.

Indices = NDArray[np.int64]
FILLER = -1  # the index used if a rank has no sample left in the last batch of an evaluation
ROUNDS = 16  # of the Feistel network: 8 do not give uniform permutations of 5 samples (chi2/df 5.8; with 16, 0.9)
BLOCK = 8192  # indices computed at once: 0.14 us per sample, as with 65,536; 2.4 us with 64
SPLIT_SEED = 0x5EED  # of the validation split, which must not depend on `seed`


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): every bit of the output depends on every bit of the input."""
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def permutation_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Round keys of the permutation for (seed, epoch)."""
    start = mix(np.array([seed], np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(epoch))
    return mix(start + np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step (Steele, Lea, Flood 2014)
COPY = np.uint64(0xD1342543DE82EF95)  # a different odd number, for the copies of a sample


def sample_states(name: str, index_B: Indices, *, seed: int, epoch: int, repeats: int = 1) -> NDArray[np.uint64]:
    """The states from which samples' random numbers are computed: a function of (seed, epoch, sample, copy, name).

    `repeats` consecutive samples are copies of one. `name` keeps operations independent: adding or removing one does
    not change the random numbers of the others.
    """
    key = key_of(name, seed, epoch)
    copy_B = (np.arange(len(index_B)) % repeats).astype(np.uint64)
    return mix(index_B.astype(np.uint64) * GOLDEN + copy_B * COPY + key)


@lru_cache(64)
def key_of(name: str, seed: int, epoch: int) -> NDArray[np.uint64]:
    name_hash = np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]))
    return mix(name_hash ^ permutation_keys(seed, epoch)[:1])


def permute(positions: Indices, n: int, seed: int, epoch: int) -> Indices:
    """Maps `positions` by a pseudo-random permutation of 0..n-1.

    A Feistel network on a grid of a x b >= n cells, whose halves are added modulo a and b (Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002). Values outside of 0..n-1 are mapped again until they are inside.
    """
    a = max(1, int(np.ceil(np.sqrt(n))))
    b = -(-n // a)
    round_keys = permutation_keys(seed, epoch)
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


def index_in_step(rank: int, world: int, part: Any, parts: int, in_blocks: bool) -> Any:
    """Which micro-batch of a global batch a process computes as the `part`-th of its `parts`.

    They are contiguous (`in_blocks`) or every world-th. `part` is a number or an array, and so is the result.
    """
    return rank * parts + part if in_blocks else part * world + rank


@dataclass(frozen=True)
class Split:
    """A fixed part of a data set: `count` samples starting at `first`, in the split's own order or in file order.

    Wraps around at the end.
    """

    total: int
    first: int
    count: int
    shuffled: bool = True
    order_N: Indices | None = field(default=None, compare=False)  # replaces the split's own order

    def indices(self, positions: Indices) -> Indices:
        """The data-set indices of the split's samples at `positions`."""
        places = (positions + self.first) % self.total
        if self.order_N is not None:
            return self.order_N[places]
        return permute(places, self.total, SPLIT_SEED, 0) if self.shuffled else places

    def ordered(self, places: Indices, seed: int, epoch: int) -> Indices:
        """The data-set indices of the samples at `places` in an epoch."""
        return self.indices(permute(places, self.count, seed, epoch))


def val_count(train: int, fraction: float) -> int:
    """How many of `train` samples to hold out for validation: at least one."""
    return max(1, round(train * fraction))


@dataclass(eq=False)
class TrainBatches:
    """The micro-batches of one rank. All ranks and accumulation steps together form the global batches.

    A sampler for torch's DataLoader: `DataLoader(data, sampler=TrainBatches(...), batch_size=None)` for data that is
    indexed by arrays, or `batch_sampler=` for a map-style data set. Drops the last samples of an epoch that do not fill
    a global batch; these differ between epochs.
    """

    split: Split
    _: KW_ONLY
    batch: int
    seed: int
    rank: int = 0
    world: int = 1
    accumulate: int = 1
    contiguous: bool = False
    repeats: int = 1  # consecutive copies of each sample; `batch` does not count them
    epoch: int = 0
    start: int = 0  # micro-batches to skip in the next iteration, to resume

    def __post_init__(self) -> None:
        if self.batch % (self.world * self.accumulate):
            raise ValueError(
                f"a global batch of {self.batch} cannot be divided by {self.world} processes x {self.accumulate} micro-batches"
            )

    def __len__(self) -> int:
        return self.split.count // self.batch * self.accumulate

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer before each epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Indices]:
        first, self.start = self.start, 0
        share = self.batch // (self.world * self.accumulate)
        block = max(1, BLOCK // share)
        for begin in range(first, len(self), block):
            micro = np.arange(begin, min(begin + block, len(self)))
            step, part = np.divmod(micro, self.accumulate)
            slot = index_in_step(self.rank, self.world, part, self.accumulate, self.contiguous)
            starts = (step * self.world * self.accumulate + slot) * share
            order = (starts[:, None] + np.arange(share)).ravel()
            samples = self.split.ordered(order, self.seed, self.epoch)
            yield from samples.repeat(self.repeats).reshape(-1, share * self.repeats)


class EvalSampler:
    """Yields each sample of a split exactly once over all ranks, and the same number of batches on every rank. Global
    batches contain the same samples for any number of ranks.

    `padded`: all shares have the same size, because strategies that communicate in forward (fsdp; ddp with buffers)
    would wait for a rank that has run out of samples. Empty positions hold FILLER; the task never sees these samples.
    With `shards`, a batch has that many parts, and each rank computes its parts one after the other.

    Otherwise, for modules that do not support fillers, shares differ by at most one sample and none is empty. A batch
    has at least one sample per rank: a smaller remainder joins the previous batch.
    """

    def __init__(
        self, split: Split, *, batch: int, rank: int = 0, world: int = 1, shards: int | None = None, padded: bool = True
    ) -> None:
        if split.count < world and not padded:
            raise ValueError(f"{split.count} samples cannot be divided among {world} processes")
        self.split, self.rank, self.world = split, rank, world
        self.parts = (shards or world) // world if padded else 1  # of a batch, per rank
        self.bounds = [*range(0, split.count, batch if padded else max(batch, world)), split.count]
        if not padded and len(self.bounds) > 2 and self.bounds[-1] - self.bounds[-2] < world:
            del self.bounds[-2]
        parts = self.parts * world
        self.width = -(-min(batch, split.count) // parts) * parts if padded else None  # of a batch, including fillers

    def __len__(self) -> int:
        return (len(self.bounds) - 1) * self.parts

    def __iter__(self) -> Iterator[Indices]:
        parts = self.parts * self.world
        for first, end in pairwise(self.bounds):
            width = self.width or end - first
            for part in range(self.rank, parts, self.world):
                begin, stop = (first + width * n // parts for n in (part, part + 1))
                inside = np.arange(begin, min(stop, end))
                yield np.append(self.split.indices(inside), np.full(stop - begin - len(inside), FILLER))


Sampler = TrainBatches | EvalSampler


# --- Holds out a fixed part of every class, independent of `seed` ---

PARTS = ("train", "val", "test")


def divide_parts(
    part_N: NDArray[np.str_], strata_N: NDArray[np.int64], fractions: Mapping[str, float]
) -> NDArray[np.str_]:
    """The part of each sample. Parts in `fractions` that are missing in `part_N` are split off from its train part.

    They get their fraction of each stratum: at least one sample, but never all.
    """
    part_N = part_N.copy()
    for name, fraction in fractions.items():
        if (part_N == name).any():
            continue
        train = np.flatnonzero(part_N == "train")
        train = train[np.argsort(strata_N[train], kind="stable")]
        for members in np.split(train, np.flatnonzero(np.diff(strata_N[train])) + 1):
            count = min(max(1, round(len(members) * fraction)), len(members) - 1)
            if count > 0:
                stratum = int(strata_N[members[0]])
                part_N[members[permute(np.arange(count), len(members), SPLIT_SEED, stratum)]] = name
    return part_N


# --- Balanced sampling: every class equally often, as arithmetic on (seed, epoch, place) ---

ROUND = 2**40  # separates the seeds of the orders of different classes, and of epochs


@dataclass(frozen=True)
class Balanced(Split):
    """A split whose epochs draw every class equally often, and the samples of a class in turn."""

    members: tuple[Indices, ...] = ()  # positions in the split, by class

    def ordered(self, places: Indices, seed: int, epoch: int) -> Indices:
        place_N = permute(places, self.count, seed, epoch)
        offset = epoch * self.count  # the turns continue from epoch to epoch
        turn_N, class_N = np.divmod(place_N + offset, len(self.members))
        position_N = np.empty_like(place_N)
        for number, members in enumerate(self.members):
            rows = np.flatnonzero(class_N == number)
            round_N, within_N = np.divmod(turn_N[rows], len(members))
            for index in np.unique(round_N):
                round_rows = rows[round_N == index]
                order = permute(within_N[round_N == index], len(members), seed, (number + 1) * ROUND + int(index))
                position_N[round_rows] = members[order]
        return self.indices(position_N)
