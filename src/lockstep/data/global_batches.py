"""The global batches of an epoch, as a user's sampler or stream gives them, and what each process computes of them."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lockstep.data.keyed import Apart
from lockstep.data.loaders import Share, Told, digest_of
from lockstep.data.sampler import BLOCK, key_of, permute, place_in_step
from lockstep.errors import UserError

# The batch of a loader is the global batch of a step. It is cut into world x accumulate shares, which differ by a sample at most, and
# each process computes `accumulate` of them. The loss of a share is weighted by its samples. A process without a sample computes the
# first ones with weight 0, because gradients are averaged over all processes.

AHEAD = 1024  # samples whose places a user's sampler gives at once, once it has given as many: 80 us of changing random states


class Global(NamedTuple):
    """A batch of all processes."""

    place: int  # of its first sample in the epoch
    batch: list[Any]  # what the dataset is asked for, or what a stream gave
    digest: str = ""  # of all batches of the epoch so far, and of what is known of the next ones
    joined: bool = False  # from several batches of the loader


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which part of each global batch is this process's."""

    rank: int = 0
    world: int = 1
    accumulate: int = 1
    contiguous: bool = False
    trains: bool = True

    @property
    def parts(self) -> int:
        return self.world * self.accumulate

    def shares(self, batches: Iterator[Global], done: int, seed: int, epoch: int, size: int | None) -> Iterator[Share]:
        """This process's, after those that are done. Each process has as many.

        `batches`: the rest of an epoch's. They have `size` samples, if that is known, and the last one may have fewer: it is not cut into
        shares of one sample, which batch norm refuses, if the others are not.
        """
        (step, part), parts = divmod(done, self.accumulate), self.parts
        least = max(1, min(2, (size or 0) // parts)) if self.trains else 1
        for number, (place, batch, digest, _) in enumerate(batches, step):
            cuts = min(parts, max(1, len(batch) // least))
            for mine in range(part, self.accumulate):
                of_step = place_in_step(self.rank, self.world, mine, self.accumulate, self.contiguous)
                begin, end = (-(-len(batch) * min(each, cuts) // cuts) for each in (of_step, of_step + 1))
                keys, weight = batch[begin:end] or batch[:least], (end - begin) * parts / len(batch)
                first = place + begin * (end > begin)
                places = range(first, first + len(keys))
                told = Told(weight, digest, len(batch) / self.accumulate, places, None if self.trains else keys)
                yield Share(keys, first, number * parts + of_step, seed, epoch, told)
            part = 0


def at_least(batches: Iterator[Global], world: int) -> Iterator[Global]:
    """For an evaluation, where each process must have a sample of each batch, and none twice: joins batches that are too small."""
    ready: Global | None = None
    small: Global | None = None
    for each in batches:
        small = joined(small, each)
        if len(small.batch) >= world:
            if ready:
                yield ready
            ready, small = small, None
    if small:
        ready = joined(ready, small)
    if ready:
        require_one_each(len(ready.batch), world)
        yield ready


def require_one_each(samples: int, world: int) -> None:
    if samples < world:
        raise UserError(
            f"{samples} samples of an evaluation cannot be divided among {world} processes. Set trainer.devices={samples}, or evaluate more samples."
        )


def joined(first: Global | None, second: Global) -> Global:
    return Global(first.place, first.batch + second.batch, second.digest, True) if first else second


def digested(value: Any, before: str, name: str) -> str:
    """Raises UserError for what cannot be compared, which `name` gave."""
    try:
        return digest_of(value, before)
    except Exception as e:
        raise UserError(
            f"{name} gives objects that cannot be compared between processes ({e}). Let it give tensors, arrays, numbers or text, or train with "
            "strategy=single."
        ) from e


# --- The global batches of an epoch ---


class Order:
    """The global batches of a loader. Its sampler is iterated in a random state of its own, keyed by seed and epoch.

    What it draws must follow from random numbers and `set_epoch`: an epoch that it counts itself is lost when a run resumes.
    """

    def __init__(self, batch_sampler: Any, compare: bool) -> None:
        divides = type(batch_sampler) is BatchSampler
        self.size: int | None = batch_sampler.batch_size if divides else None  # None: its own batch sampler decides
        self.drop_last = divides and batch_sampler.drop_last
        self.sampler, self.compare = whole(batch_sampler.sampler if divides else batch_sampler), compare
        self.name = type(self.sampler).__name__

    @property
    def count(self) -> int | None:
        """The samples of an epoch, if Lockstep knows which they are."""
        if type(self.sampler) is SequentialSampler:
            return len(self.sampler)
        if type(self.sampler) is RandomSampler and not self.sampler.replacement:
            samples = len(self.sampler.data_source)
            return samples if self.sampler.num_samples == samples else None
        return None

    def __len__(self) -> int:
        elements = len(self.sampler) if self.count is None else self.count
        if self.size is None:
            return elements
        return (elements if self.drop_last else elements + self.size - 1) // self.size

    def batches(self, seed: int, epoch: int, begin: int = 0) -> Iterator[Global]:
        """Of an epoch, from a batch on."""
        if self.size is None:
            place = 0
            for number, (keys, digest) in enumerate(each for each in self.drawn(seed, epoch) if each[0]):
                if number >= begin:
                    yield Global(place, keys, digest)
                place += len(keys)
            return
        for number, (keys, digest) in enumerate(self.in_batches(self.size, seed, epoch, begin), begin):
            if len(keys) < self.size and self.drop_last:
                return
            yield Global(number * self.size, keys, digest)

    def in_batches(self, size: int, seed: int, epoch: int, begin: int) -> Iterator[tuple[list[Any], str]]:
        """What the sampler gives, of a known order without drawing or storing an epoch."""
        if (count := self.count) is None:
            elements = islice(self.drawn(seed, epoch), begin * size, None)
            while several := [*islice(elements, size)]:
                yield [key for key, _ in several], several[-1][1]
            return
        digest, ahead = f"{count} samples" if self.compare else "", -(-BLOCK // size) * size
        for first in range(begin * size, count, ahead):
            places = np.arange(first, min(first + ahead, count))
            shuffled = permute(places, count, seed, epoch) if isinstance(self.sampler, RandomSampler) else places
            keys = shuffled.tolist()
            yield from ((keys[place : place + size], digest) for place in range(0, len(keys), size))

    def drawn(self, seed: int, epoch: int) -> Iterator[tuple[Any, str]]:
        """What a user's sampler gives, a few at first: it may not want to be asked early."""
        for told in (self.sampler, getattr(self.sampler, "sampler", None)):
            if callable(set_epoch := getattr(told, "set_epoch", None)):
                set_epoch(epoch)
        apart = Apart(int(key_of("order", seed, epoch)[0]), self.sampler)
        with apart:
            elements = iter(self.sampler) if self.size else map(list, self.sampler)
        digest, ahead = "", 1
        while True:
            with apart:
                several = [*islice(elements, ahead)]
            if not several:
                return
            if self.compare:
                digest = digested(several, digest, self.name)
            yield from ((each, digest) for each in several)
            ahead = min(2 * ahead, AHEAD if self.size else 1 + AHEAD // max(1, len(several[0])))


def whole(sampler: Any) -> Any:
    """torch's DistributedSampler gives one process all samples; a batch sampler around it too. Otherwise they would be divided twice."""
    if isinstance(sampler, DistributedSampler):
        sampler = copy.copy(sampler)
        sampler.num_replicas, sampler.rank = 1, 0
        sampler.num_samples = sampler.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    elif isinstance(inner := getattr(sampler, "sampler", None), DistributedSampler):
        sampler = copy.copy(sampler)
        sampler.sampler = whole(inner)
    return sampler
