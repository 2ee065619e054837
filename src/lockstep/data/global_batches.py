"""The global batches of an epoch, from a user's sampler or stream, and the share of them that each process computes."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from operator import length_hint
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lockstep.data.keyed import IsolatedRandomState
from lockstep.data.loaders import MicroBatchInfo, Share, digest_of
from lockstep.data.sampler import BLOCK, Indices, index_in_step, key_of, permute
from lockstep.errors import UserError

# The batch of a loader is the global batch of a step. It is split into world x accumulate shares, whose sizes differ by
# at most one sample. Each process computes `accumulate` of them. The loss of a share is weighted by its size. A process
# without samples computes the first ones with weight 0, because gradients are averaged over all processes.

AHEAD = 1024  # most indices drawn from a user's sampler at once: switching random states takes 80 us


class GlobalBatch(NamedTuple):
    """A batch of all processes."""

    place: int  # position of its first sample in the epoch
    batch: Any  # keys for the dataset; places, from which they are computed; or the samples of a stream
    digest: str = ""  # of all batches of the epoch so far, and of what has been drawn for the next ones


@dataclass(frozen=True, kw_only=True)
class ShareSpec:
    """Which part of each global batch this process computes."""

    rank: int = 0
    world: int = 1
    accumulate: int = 1
    contiguous: bool = False
    trains: bool = True

    @property
    def parts(self) -> int:
        return self.world * self.accumulate

    def shares(
        self, batches: Iterator[GlobalBatch], done: int, seed: int, epoch: int, size: int | None, by_step: bool = False
    ) -> Iterator[Share]:
        """This process's shares of the remaining `batches` of an epoch, after `done` shares: equally many per process.

        A batch has `size` samples, if known; the last one may have fewer. It is not split into shares of one sample,
        which batch norm rejects, unless the other batches are.
        """
        (step, part), parts = divmod(done, self.accumulate), self.parts
        min_size = max(1, min(2, (size or 0) // parts)) if self.trains else 1
        for number, (start, batch, digest) in enumerate(batches, step):
            pieces = min(parts, max(1, len(batch) // min_size))
            for micro in range(part, self.accumulate):
                index = index_in_step(self.rank, self.world, micro, self.accumulate, self.contiguous)
                begin, end = bounds(len(batch), index, pieces)
                keys, weight = batch[begin:end] or batch[:min_size], (end - begin) * parts / len(batch)
                position = start + begin * (end > begin)
                places, kept = range(position, position + len(keys)), None if self.trains else keys
                info = MicroBatchInfo(weight, digest, len(batch) / self.accumulate, places, start * by_step, kept)
                yield Share(keys, position, number * parts + index, seed, epoch, info)
            part = 0


@cache
def bounds(count: int, index: int, pieces: int) -> tuple[int, int]:
    """Where the share `index` of a batch begins and ends."""
    begin, end = (-(-count * min(i, pieces) // pieces) for i in (index, index + 1))
    return begin, end


def join_small_batches(batches: Iterator[GlobalBatch], parts: int) -> Iterator[GlobalBatch]:
    """For evaluation: joins batches that are too small for each process, or logical rank, to get a sample of its own."""
    ready: GlobalBatch | None = None
    small: GlobalBatch | None = None
    for batch in batches:
        small = join_two(small, batch)
        if len(small.batch) >= parts:
            if ready:
                yield ready
            ready, small = small, None
    if small:
        ready = join_two(ready, small)
    if ready:
        if len(ready.batch) < parts:
            raise UserError(
                f"{len(ready.batch)} samples of an evaluation cannot be divided among {parts} processes or logical ranks. Evaluate more samples, or set "
                f"trainer.devices={len(ready.batch)} and no more exact.logical_ranks."
            )
        yield ready


def join_two(first: GlobalBatch | None, second: GlobalBatch) -> GlobalBatch:
    if first is None:
        return second
    one, other = first.batch, second.batch
    joined = range(one.start, other.stop) if isinstance(one, range) else one + other
    return GlobalBatch(first.place, joined, second.digest)


# --- The global batches of an epoch ---


class GlobalBatches:
    """The global batches of a loader. Iterates its sampler in a separate random state, keyed by seed and epoch.

    The order must depend only on random numbers, `set_epoch` and earlier epochs, which a resumed run repeats.
    """

    def __init__(self, batch_sampler: Any, compare: bool, reload_every: int = 0) -> None:
        divides = type(batch_sampler) is BatchSampler
        self.size: int | None = batch_sampler.batch_size if divides else None  # None: the batch sampler decides
        self.drop_last = divides and batch_sampler.drop_last
        sampler = self.sampler = without_rank_split(batch_sampler.sampler if divides else batch_sampler)
        self.name, self.compare = type(sampler).__name__, compare
        # the order of torch's own samplers, or one that is computed, does not depend on earlier epochs
        self.is_own = not (hasattr(sampler, "at") or type(sampler).__module__.startswith("torch."))
        self.reload_every = reload_every  # epochs after which the Trainer makes a new sampler; 0: never
        self.next_epoch = 0  # the first one that has not been drawn
        # The keys at places of an epoch, if Lockstep can compute them without the sampler.
        self.at: Callable[[Indices, int, int], Indices] | None = getattr(sampler, "at", None)
        if type(sampler) is SequentialSampler:
            self.at = lambda places, *_: places
        elif type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
            self.at = lambda places, seed, epoch: permute(places, len(sampler), seed, epoch)

    def __len__(self) -> int:
        elements = len(self.sampler)
        if self.size is None:
            return elements
        return (elements if self.drop_last else elements + self.size - 1) // self.size

    def batches(self, seed: int, epoch: int, begin: int = 0) -> Iterator[GlobalBatch]:
        """The batches of an epoch, starting at batch `begin`. `with_keys` turns places into keys."""
        batches: Iterator[tuple[Any, str]]
        if self.size is None:
            batches = (item for item in self.drawn(seed, epoch) if item[0])
            position = sum(len(keys) for keys, _ in islice(batches, begin))
        elif self.at is None:
            position = begin * self.size
            elements = islice(self.drawn(seed, epoch), position, None)
            chunks = iter(lambda: [*islice(elements, self.size)], [])
            batches = (([key for key, _ in chunk], chunk[-1][1]) for chunk in chunks)
        else:
            position, count, size = begin * self.size, len(self.sampler), self.size
            digest = f"{count} samples" if self.compare else ""
            batches = ((range(i, min(i + size, count)), digest) for i in range(position, count, size))  # places
        for keys, digest in batches:
            if self.drop_last and len(keys) < (self.size or 0):
                return
            yield GlobalBatch(position, keys, digest)
            position += len(keys)

    def with_keys(self, shares: Iterator[Share], seed: int, epoch: int) -> Iterator[Share]:
        """Computes the keys at the places of many shares at once, if the order is computed: no process holds an epoch."""
        if self.at is None or self.size is None:
            yield from shares
            return
        ahead = 1
        while chunk := [*islice(shares, ahead)]:
            places = np.concatenate([np.arange(share.keys.start, share.keys.stop) for share in chunk])  # type: ignore[attr-defined]
            keys, begin = self.at(places, seed, epoch).tolist(), 0
            for share in chunk:
                own = keys[begin : begin + len(share.keys)]
                begin += len(own)
                info = share.info if share.info.keys is None else replace(share.info, keys=own)
                yield share._replace(keys=own, info=info)
            ahead = max(1, BLOCK * len(chunk) // len(places))

    def drawn(self, seed: int, epoch: int) -> Iterator[tuple[Any, str]]:
        """What a user's sampler yields. A resumed run first iterates it for earlier epochs: many shuffle in place."""
        begin = max(self.next_epoch, epoch // self.reload_every * self.reload_every if self.reload_every else 0)
        self.next_epoch = epoch + 1
        if self.is_own:
            count = length_hint(self) * (self.size or 1)  # 0 without a length: it may never end
            for earlier in range(begin, epoch):
                deque(islice(self.drawn_in(seed, earlier), count), 0)
        yield from self.drawn_in(seed, epoch)

    def drawn_in(self, seed: int, epoch: int) -> Iterator[tuple[Any, str]]:
        """Draws few elements at first: the sampler may not be meant to run ahead."""
        for sampler in (self.sampler, getattr(self.sampler, "sampler", None)):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)
        random_state = IsolatedRandomState(key_of("order", seed, epoch), self.sampler)
        take = random_state.reader(lambda: self.sampler if self.size else map(list, self.sampler))
        digest, ahead = "", 1
        while chunk := take(ahead):
            if self.compare:
                digest = digest_of(chunk, digest)
            yield from ((element, digest) for element in chunk)
            ahead = min(2 * ahead, AHEAD if self.size else 1 + AHEAD // max(1, len(chunk[0])))


def without_rank_split(sampler: Any) -> Any:
    """Makes torch's DistributedSampler, also in a batch sampler, return all samples: else they are divided twice."""
    if isinstance(sampler, DistributedSampler):
        sampler = copy.copy(sampler)
        sampler.num_replicas, sampler.rank = 1, 0
        sampler.num_samples = sampler.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    elif isinstance(inner := getattr(sampler, "sampler", None), DistributedSampler):
        sampler = copy.copy(sampler)
        sampler.sampler = without_rank_split(inner)
    return sampler
