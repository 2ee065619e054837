"""Loaders without places to take samples from: streams, and what makes its batches itself."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep.data.global_batches import Cut, Global, at_least, digested
from lockstep.data.keyed import Apart
from lockstep.data.loaders import OfStream, Packs, Told
from lockstep.data.sampler import key_of
from lockstep.data.standard import Brought, Division, Gets, StandardLoader, from_workers

log = logging.getLogger("lockstep")
AGAIN = "a resumed run reads again what it had read"


class Shares(Packs, IterableDataset[Any]):
    """One process's micro-batches of a stream, which it reads whole. Collated here, because this goes to a worker."""

    def __init__(self, given: DataLoader[Any], cut: Cut) -> None:
        super().__init__()
        self.dataset, self.collate, self.cut = given.dataset, OfStream(given.collate_fn), cut
        self.size, self.drop_last = given.batch_size or 1, given.drop_last
        # seed, epoch, micro-batches done: for a worker that stays
        self.place = torch.zeros(3, dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[Any]:
        seed, epoch, done = self.place.tolist()
        cut, batches = self.cut, self.batches(seed, epoch)
        rest = islice(batches if cut.trains else at_least(batches, cut.world), done // cut.accumulate, None)
        for share in cut.shares(rest, done, seed, epoch, self.size):
            yield self.packed(self.collate(share))

    def batches(self, seed: int, epoch: int) -> Iterator[Global]:
        apart, place, digest = Apart(int(key_of("order", seed, epoch)[0]), self.dataset), 0, ""
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        with apart:
            samples = iter(self.dataset)
        while True:
            with apart:
                batch = [*islice(samples, self.size)]
            if not batch or (self.drop_last and len(batch) < self.size):
                return
            if self.cut.world > 1:
                digest = digested(batch, digest, type(self.dataset).__name__)
            yield Global(place, batch, digest)
            place += len(batch)


class Compared(Brought):
    """The first time that its batches are requested, all processes do so, and compare the first one. What each process gets decides:
    processes with batches of their own end together, because the others would wait for one that has no more."""

    def __init__(self, given: Any, division: Division) -> None:
        super().__init__(given, division)
        self.undecided, self.equally_long = division.world > 1, True

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        if self.undecided:
            first = [*islice(batches, 1)]
            self.undecided = False
            again = self.decide(self.division.agree(self.told[max(self.told)].digest if first else ""))
            self.equally_long = self.gets != "its own" or self.division.agree(str(self.length))
            if again:
                self.began = None
                return iter(self)
            batches = chain(first, batches)
        return self.together(batches) if self.gets == "its own" and self.division.world > 1 else batches

    def decide(self, same: bool) -> bool:
        """Whether the batches must begin again, because they are divided in another way."""
        raise NotImplementedError

    def together(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if not self.division.agree("more"):
                log.warning("%s: another process has no more batches, so the epoch ends here", self.name)
                return
            yield batch
        self.division.agree("no more")


class StreamLoader(Compared):
    """Batches of an IterableDataset: each process reads the whole stream, and collates its share. Or its own, if the stream divides itself."""

    def __init__(self, given: DataLoader[Any], division: Division) -> None:
        super().__init__(given, division)
        self.name, self.size = type(given.dataset).__name__, given.batch_size
        reads = "one worker of each process reads" if given.num_workers else "each process reads"
        self.notes = [f"{self.name} is a stream: {reads} all of it, and {AGAIN}", *self.limits()]
        self.begin(division.cut)

    def begin(self, cut: Cut) -> None:
        self.data = Shares(self.given, cut)
        self.reader = from_workers(self.given, self.data, num_workers=min(1, self.given.num_workers))

    def decide(self, same: bool) -> bool:
        if not same:
            self.gets, self.size = "its own", None
            self.notes = [
                f"{self.name} is a stream of other samples in each process: its batches are not divided, and {AGAIN}"
            ]
            self.begin(replace(self.division.cut, rank=0, world=1, accumulate=1))
        return not same

    def __len__(self) -> int:
        """Unknown as long as nobody knows whether the stream divides itself."""
        if not self.equally_long or (self.undecided and self.division.accumulate > 1):
            raise TypeError("a stream has no length")
        return len(self.given) * (self.division.accumulate if self.gets == "a share" else 1)

    def items(self, seed: int, epoch: int, done: int) -> Iterator[tuple[Any, Told]]:
        self.data.place.copy_(torch.tensor([seed, epoch, done]))
        return self.reader.batches()

    def close(self) -> None:
        self.begin(self.data.cut)


class LeftAlone(Compared):
    """Batches of a user's own loader as it makes them, in a random state of their own, which is the same in each process.

    A run resumes within an epoch by reading what it had read.
    """

    gets: Gets = "all"

    def __init__(self, given: Any, division: Division, why: str) -> None:
        super().__init__(given, division)
        self.notes = [f"{why}: its batches are not divided, and {AGAIN}"]

    def __len__(self) -> int:
        if not self.equally_long:
            raise TypeError("processes have several lengths")
        return len(self.given)

    def decide(self, same: bool) -> bool:
        self.gets = "all" if same else "its own"
        return False

    def items(self, seed: int, epoch: int, done: int) -> Iterator[tuple[Any, Told]]:
        for batch in islice(self.apart(seed, epoch), done, None):
            yield batch, Told(1.0, digested(batch, "", self.name) if self.undecided else "", None)

    def apart(self, seed: int, epoch: int) -> Iterator[Any]:
        apart, ended = Apart(int(key_of("order", seed, epoch)[0]), self.given), object()
        with apart:
            batches = iter(self.given)
        while True:
            with apart:
                batch = next(batches, ended)
            if batch is ended:
                return
            yield batch


def around(given: Any, division: Division) -> Brought:
    """What the Trainer gets in place of a loader that somebody brought."""
    name = type(given).__name__
    if not isinstance(given, DataLoader):
        return LeftAlone(given, division, f"{name} is no DataLoader")
    if type(given).__iter__ is not DataLoader.__iter__:
        return LeftAlone(given, division, f"{name} has an __iter__ of its own")
    if given.batch_size is None and given.batch_sampler is None:
        return LeftAlone(given, division, f"{name} has batch_size=None")
    if isinstance(given.dataset, IterableDataset):
        return StreamLoader(given, division)
    return StandardLoader(given, division)
