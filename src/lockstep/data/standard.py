"""DataLoaders as people bring them: dataset, collate function and workers are theirs; order, division, position and random numbers are Lockstep's."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from lockstep.data.keyed import Apart
from lockstep.data.loaders import MicroBatches, OfStream, ResumableLoader, Share, as_it_is, begin_worker, content
from lockstep.data.sampler import BLOCK, key_of, permute, place_in_step
from lockstep.errors import UserError

# The batch of a loader is the global batch of a step. It is cut into world x accumulate shares, which differ by a sample at most, and
# each process computes `accumulate` of them. The loss of a share is weighted by its samples. A process without a sample computes the
# first one with weight 0, because gradients are averaged over all processes.

OPTIONS = "num_workers", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers"
DRAWN = 2**16  # elements of a user's sampler that are drawn and compared at once
Batches = Iterator[tuple[int, list[Any]]]  # the place of the first sample in the epoch; what the dataset is asked for


@dataclass(frozen=True, kw_only=True)
class Division:
    """Which part of each global batch is this process's, and where it is in the run."""

    seed: int
    rank: int = 0
    world: int = 1
    accumulate: int = 1
    contiguous: bool = False
    trains: bool = True
    position: Callable[[], tuple[int, int]] = lambda: (0, 0)  # the epoch, and how many micro-batches of it are done
    number: Callable[[Any], int] = lambda _: 0  # of a loader among those that train together
    agree: Callable[[str], bool] = lambda _: True  # whether all processes pass the same text

    @property
    def parts(self) -> int:
        return self.world * self.accumulate

    def seed_of(self, loader: Any, turn: int = 0) -> int:
        """Loaders that train together have different orders, and a loader that begins again within an epoch has a new one."""
        number = self.number(loader) if self.trains else 0
        return int(key_of(f"loader {number}, turn {turn}", self.seed, 0)[0]) if number or turn else self.seed

    def shares(self, batches: Batches, step: int, part: int, seed: int, epoch: int) -> Iterator[Share]:
        """This process's, of global batches from a step on, in which it begins with its micro-batch `part`. Each process has as many."""
        batches, parts = batches if self.trains else at_least(batches, self.world), self.parts
        for number, (place, batch) in enumerate(batches, step):
            for mine in range(part, self.accumulate):
                of_step = place_in_step(self.rank, self.world, mine, self.accumulate, self.contiguous)
                begin, end = (-(-len(batch) * each // parts) for each in (of_step, of_step + 1))
                keys, weight = batch[begin:end] or batch[:1], (end - begin) * parts / len(batch)
                yield Share(keys, place + begin * (end > begin), number * parts + of_step, weight, seed, epoch)
            part = 0


# --- The global batches of an epoch, and their shares ---


class Order:
    """The global batches of a loader. Its sampler is iterated in a random state of its own, keyed by seed and epoch.

    What it draws must follow from random numbers and `set_epoch`: an epoch that it counts itself is lost when a run resumes.
    """

    def __init__(self, batch_sampler: Any, division: Division) -> None:
        self.division = division
        divides = type(batch_sampler) is BatchSampler
        self.size: int | None = batch_sampler.batch_size if divides else None  # None: its own batch sampler decides
        self.drop_last = divides and batch_sampler.drop_last
        self.sampler = whole(batch_sampler.sampler if divides else batch_sampler)
        self.shuffles, self.count = False, None
        if type(self.sampler) in (RandomSampler, SequentialSampler):
            samples = len(self.sampler.data_source)
            self.shuffles = isinstance(self.sampler, RandomSampler)
            if not self.shuffles or (not self.sampler.replacement and self.sampler.num_samples == samples):
                self.count = samples

    def __len__(self) -> int:
        elements = len(self.sampler) if self.count is None else self.count
        return (
            elements if self.size is None else (elements if self.drop_last else elements + self.size - 1) // self.size
        )

    def batches(self, step: int, seed: int, epoch: int) -> Batches:
        """Of an epoch from a step on."""
        if self.size is None:
            place = 0
            for number, batch in enumerate(filter(len, map(list, self.drawn(seed, epoch)))):
                if number >= step:
                    yield place, batch
                place += len(batch)
            return
        place = step * self.size
        keys = islice(self.drawn(seed, epoch), place, None) if self.count is None else self.known(place, seed, epoch)
        while batch := [*islice(keys, self.size)]:
            if len(batch) < self.size and self.drop_last:
                return
            yield place, batch
            place += self.size

    def shares(self, done: int, seed: int, epoch: int) -> Iterator[Share]:
        """This process's, after those that are done."""
        step, part = divmod(done, self.division.accumulate)
        return self.division.shares(self.batches(step, seed, epoch), step, part, seed, epoch)

    def known(self, place: int, seed: int, epoch: int) -> Iterator[int]:
        """Without drawing or storing an epoch."""
        assert self.count is not None
        self.require_agreement(self.count)
        for begin in range(place, self.count, BLOCK):
            places = np.arange(begin, min(begin + BLOCK, self.count))
            yield from (permute(places, self.count, seed, epoch) if self.shuffles else places).tolist()

    def drawn(self, seed: int, epoch: int) -> Iterator[Any]:
        for told in (self.sampler, getattr(self.sampler, "sampler", None)):
            if callable(set_epoch := getattr(told, "set_epoch", None)):
                set_epoch(epoch)
        apart = Apart(int(key_of("order", seed, epoch)[0]), self.sampler)
        with apart:
            elements = iter(self.sampler)
        while True:
            with apart:
                several = [*islice(elements, DRAWN)]
            self.require_agreement(several)
            if not several:
                return
            yield from several

    def require_agreement(self, order: Any) -> None:
        if self.division.world > 1 and not self.division.agree(repr(order)):
            raise UserError(
                f"{type(self.sampler).__name__} gives other samples in each process. Lockstep divides each batch among the processes: let the sampler "
                "give the samples of all of them, by torch's, NumPy's or Python's random numbers or by set_epoch, and remove what depends on the rank."
            )


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


def at_least(batches: Batches, world: int) -> Batches:
    """For an evaluation, where each process must have a sample of each batch, and none twice: joins batches that are too small."""
    ready: list[Any] = []
    small: list[Any] = []
    begin = place = 0
    for first, batch in batches:
        place = place if small else first
        small += batch
        if len(small) >= world:
            if ready:
                yield begin, ready
            begin, ready, small = place, small, []
    ready = ready + small
    if 0 < len(ready) < world:
        raise UserError(
            f"{len(ready)} samples of an evaluation cannot be divided among {world} processes. Set trainer.devices={len(ready)}, or evaluate more samples."
        )
    if ready:
        yield begin, ready


# --- What the Trainer gets in place of a user's loader ---


class Due:
    """The sampler of the DataLoader that reads: shares of one epoch after the other, so workers can stay."""

    def __init__(self) -> None:
        self.shares: Iterator[Share] = iter(())

    def __iter__(self) -> Iterator[Share]:
        return self.shares


class Brought(ResumableLoader):
    """A user's loader in place of which the Trainer gets this one. It has the attributes of the user's."""

    is_divided = True
    note: str | None = None  # for the first lines of a run: what limits its promises

    def __init__(self, given: Any, division: Division) -> None:
        self.given, self.division = given, division
        self.weights: dict[int, float] = {}  # of the last micro-batches, by their number in the epoch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "given":
            raise AttributeError(name)
        return getattr(self.given, name)

    def weighted(self, batches: Iterable[tuple[Any, float]], done: int) -> Iterator[Any]:
        for number, (batch, weight) in enumerate(batches, done):
            self.weights = {number - 1: self.weights.get(number - 1, 1.0), number: weight}
            yield batch

    def close(self) -> None:
        """Ends workers that stay."""

    def title_of(self, size: int | None, name: str) -> str:
        """For the first lines of a run."""
        division = self.division
        accumulated = f" x {division.accumulate} accumulated" if division.accumulate > 1 else ""
        if size is None:
            return f"batches of {name}, divided by {division.world}{accumulated}"
        least, most = size // division.parts, math.ceil(size / division.parts)
        return f"batch {size} = {division.world} x {most if least == most else f'{least} or {most}'}{accumulated}"


class StandardLoader(Brought):
    """A DataLoader whose batches are divided among processes and accumulation."""

    def __init__(self, given: DataLoader[Any], division: Division) -> None:
        super().__init__(given, division)
        self.order = Order(given.batch_sampler, division)
        if given.collate_fn is not default_collate:
            self.note = "collate_fn gets what one process computes at once: where it pads or draws, batches differ with the number of processes"
        self.due = Due()
        self.reader: DataLoader[Any] | None = None
        self.begun = -1  # the epoch that was begun last

    def __len__(self) -> int:
        length = len(self.order) * self.division.accumulate
        if self.division.trains or self.division.world == 1:
            return length
        if "length" not in vars(self):
            self.length = sum(1 for _ in at_least(self.order.batches(0, self.division.seed, 0), self.division.world))
        return self.length

    def __iter__(self) -> Iterator[Any]:
        """From the Trainer's position on."""
        epoch, done = self.division.position()
        try:
            length = len(self)
        except TypeError:  # nobody knows
            length = done + 1
        first, self.begun = self.begun != epoch, epoch
        if length == 0 or (first and done >= length):
            return  # it had ended, and begins again if loaders of other lengths take turns
        turn, done_of_turn = divmod(done, length)
        seed = self.division.seed_of(self, turn)
        self.due.shares = self.order.shares(done_of_turn, seed, epoch)
        self.reader = self.new_reader() if self.reader is None else self.reader
        self.reader.generator.manual_seed(int(key_of("workers", seed, epoch)[0]) >> 1)
        yield from self.weighted(self.reader, done)

    def new_reader(self) -> DataLoader[Any]:
        given = self.given
        return DataLoader(
            MicroBatches(given.dataset, given.collate_fn),
            sampler=self.due,  # type: ignore[arg-type]
            batch_size=None,
            collate_fn=as_it_is,
            worker_init_fn=partial(begin_worker, given.worker_init_fn),
            generator=torch.Generator(),  # of the seeds of workers, which would be drawn from the process's own
            **{name: getattr(given, name) for name in OPTIONS},
        )

    def close(self) -> None:
        self.reader, self.due.shares = None, iter(())

    @property
    def title(self) -> str:
        return self.title_of(self.order.size, type(self.order.sampler).__name__)


# --- What cannot be taken apart ---


class LeftAlone(Brought):
    """Batches of a user's own loader as it makes them, in a random state of their own, which is the same in each process.

    A run resumes within an epoch by reading what it had read, unless the loader saves its position itself.
    """

    is_divided = False

    def __init__(self, given: Any, division: Division, why: str) -> None:
        super().__init__(given, division)
        self.note = f"{why}: each process reads all of it, and a resumed run reads again what it had read"

    def __len__(self) -> int:
        return len(self.given)

    def __iter__(self) -> Iterator[Any]:
        epoch, done = self.division.position()
        return islice(self.apart(self.given, epoch), 0 if hasattr(self.given, "load_state_dict") else done, None)

    def apart(self, loader: Iterable[Any], epoch: int) -> Iterator[Any]:
        apart, ended = Apart(int(key_of("order", self.division.seed_of(self), epoch)[0])), object()
        with apart:
            batches = iter(loader)
        while True:
            with apart:
                batch = next(batches, ended)
            if batch is ended:
                return
            yield batch

    @property
    def title(self) -> str:
        accumulated = f" x {self.division.accumulate} accumulated" if self.division.accumulate > 1 else ""
        return f"each process has its own batches{accumulated}"

    def state_dict(self) -> dict[str, Any]:
        return getattr(self.given, "state_dict", dict)()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if hasattr(self.given, "load_state_dict"):
            self.given.load_state_dict(state)


class StreamLoader(LeftAlone):
    """Batches of an IterableDataset: each process reads the whole stream, and collates its share. Or its own, if the stream divides itself."""

    is_divided = True

    def __len__(self) -> int:
        """Unknown as long as nobody knows whether the stream divides itself."""
        if self.division.accumulate > 1:
            raise TypeError("a stream has no length")
        return len(self.given)

    def __iter__(self) -> Iterator[Any]:
        epoch, done = self.division.position()
        given, division, seed = self.given, self.division, self.division.seed_of(self)
        reader: DataLoader[Any] = DataLoader(
            given.dataset,
            batch_size=given.batch_size,
            drop_last=given.drop_last,
            collate_fn=as_it_is,
            worker_init_fn=given.worker_init_fn,
            **{name: getattr(given, name) for name in OPTIONS if name != "pin_memory"},
        )
        batches = enumerate(self.apart(reader, epoch))
        first = [*islice(batches, 1)]
        self.is_divided = division.world == 1 or division.agree(content(first))
        if not self.is_divided:
            division = replace(division, rank=0, world=1, accumulate=1)
        step, part = divmod(done, division.accumulate)
        shares = division.shares(islice(chain(first, batches), step, None), step, part, seed, epoch)
        collate = OfStream(given.collate_fn)
        yield from self.weighted(((collate[share][0], share.weight) for share in shares), done)

    @property
    def title(self) -> str:
        return self.title_of(self.given.batch_size, "") if self.is_divided else super().title


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
        return StreamLoader(given, division, f"{type(given.dataset).__name__} is a stream")
    return StandardLoader(given, division)


def standard(loaders: Any) -> list[Brought]:
    """Those among the loaders of a Trainer, in whatever collection."""
    found: list[Any] = []
    apply_to_collection(loaders, Brought, found.append)
    return found
