"""Loaders without places to take samples from: streams, and what makes its batches itself."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep.data.global_batches import Cut, Digest, Global, at_least
from lockstep.data.keyed import Apart
from lockstep.data.loaders import OfStream, Packs
from lockstep.data.sampler import key_of
from lockstep.data.standard import Brought, Division, StandardLoader, from_workers

AGAIN = "a resumed run reads again what it had read"


class Shares(Packs, IterableDataset[Any]):
    """One process's micro-batches of a stream, which it reads whole. Collated here, because this goes to a worker."""

    def __init__(self, given: DataLoader[Any], cut: Cut) -> None:
        super().__init__()
        self.dataset, self.collate, self.cut = given.dataset, OfStream(given.collate_fn), cut
        self.size, self.drop_last = given.batch_size or 1, given.drop_last
        self.place = torch.zeros(
            3, dtype=torch.int64
        ).share_memory_()  # seed, epoch, micro-batches done: for a worker that stays

    def __iter__(self) -> Iterator[Any]:
        seed, epoch, done = self.place.tolist()
        cut, batches = self.cut, self.batches(seed, epoch)
        rest = islice(batches if cut.trains else at_least(batches, cut.world), done // cut.accumulate, None)
        for share in cut.shares(rest, done, seed, epoch, self.size):
            yield self.packed(self.collate(share))

    def batches(self, seed: int, epoch: int) -> Iterator[Global]:
        apart = Apart(int(key_of("order", seed, epoch)[0]), self.dataset)
        with apart:
            samples = iter(self.dataset)
        digest, place, found = Digest(), 0, ""
        while True:
            with apart:
                batch = [*islice(samples, self.size)]
            if not batch or (self.drop_last and len(batch) < self.size):
                return
            if self.cut.world > 1:
                found = digest.add(batch, type(self.dataset).__name__)
            yield Global(place, batch, found)
            place += len(batch)


class Compared(Brought):
    """The first time that its batches are requested, all processes do so, and compare the first one."""

    def __init__(self, given: Any, division: Division) -> None:
        super().__init__(given, division)
        self.undecided = division.world > 1

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        if not self.undecided:
            return batches
        first = [*islice(batches, 1)]
        self.undecided = False
        again = self.decide(self.division.agree(self.told[max(self.told)][1] if first else ""))
        return iter(self) if again else chain(first, batches)

    def decide(self, same: bool) -> bool:
        """Whether the batches must begin again, because they are divided in another way."""
        raise NotImplementedError


class StreamLoader(Compared):
    """Batches of an IterableDataset: each process reads the whole stream, and collates its share. Or its own, if the stream divides itself."""

    def __init__(self, given: DataLoader[Any], division: Division) -> None:
        super().__init__(given, division)
        self.name, self.size = type(given.dataset).__name__, given.batch_size
        reads = "one worker of each process reads" if given.num_workers else "each process reads"
        own = f"{self.name} is a stream: {reads} all of it, and {AGAIN}"
        self.notes = [own, *self.limits()]
        self.begin(division.cut)

    def begin(self, cut: Cut) -> None:
        self.data = Shares(self.given, cut)
        workers = min(1, self.given.num_workers)
        self.reader = from_workers(self.given, self.data, num_workers=workers)

    def decide(self, same: bool) -> bool:
        self.is_divided = same
        if not same:
            self.size = None
            self.notes[0] = (
                f"{self.name} is a stream of other samples in each process: its batches are not divided, and {AGAIN}"
            )
            self.began = None
            self.begin(replace(self.division.cut, rank=0, world=1, accumulate=1))
        return not same

    def __len__(self) -> int:
        """Unknown as long as nobody knows whether the stream divides itself."""
        if self.undecided and self.division.accumulate > 1:
            raise TypeError("a stream has no length")
        return len(self.given) * (self.division.accumulate if self.is_divided else 1)

    def items(self, seed: int, epoch: int, done: int) -> Iterator[tuple[Any, float, str]]:
        self.data.place.copy_(torch.tensor([seed, epoch, done]))
        return self.reader.batches()

    def close(self) -> None:
        self.begin(self.data.cut)


class LeftAlone(Compared):
    """Batches of a user's own loader as it makes them, in a random state of their own, which is the same in each process.

    A run resumes within an epoch by reading what it had read, unless the loader saves its position itself.
    """

    is_divided = False

    def __init__(self, given: Any, division: Division, why: str) -> None:
        super().__init__(given, division)
        self.restored = False
        self.notes = [f"{why}: its batches are not divided, and {AGAIN}"]

    def __len__(self) -> int:
        return len(self.given)

    def decide(self, same: bool) -> bool:
        self.alike = same
        return False

    def items(self, seed: int, epoch: int, done: int) -> Iterator[tuple[Any, float, str]]:
        skipped, self.restored = 0 if self.restored else done, False
        for batch in islice(self.apart(seed, epoch), skipped, None):
            yield batch, 1.0, Digest().add(batch, self.name) if self.undecided else ""

    def apart(self, seed: int, epoch: int) -> Iterator[Any]:
        apart, ended = Apart(int(key_of("order", seed, epoch)[0])), object()
        with apart:
            batches = iter(self.given)
        while True:
            with apart:
                batch = next(batches, ended)
            if batch is ended:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return getattr(self.given, "state_dict", dict)()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if hasattr(self.given, "load_state_dict"):
            self.given.load_state_dict(state)
            self.restored = True


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
