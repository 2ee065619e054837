"""Streams, and what makes its batches itself: divided where all processes read the same, and left as they are otherwise."""

import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from dividing import DIVISIONS, EPOCH, SEED, Process, digests, indices, joined
from packages import brought
from packages.brought import Draws, Plain, Row, pads
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lockstep.data.keyed import IsolatedRandomState
from lockstep.data.sampler import key_of
from lockstep.data.standard import Division
from lockstep.data.streams import UndividedLoader, wrap_loader

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec")


class Stream(IterableDataset):
    """Knows how often it was begun; another rank may read other samples from one on."""

    def __init__(self, differs_from: int = 23, count: int = 23) -> None:
        self.differs_from, self.count, self.begun = differs_from, count, 0

    def __iter__(self) -> Iterator[Row]:
        self.begun += 1
        for index in range(self.count):
            yield index, random.random() + (index >= self.differs_from) + self.begun / 1000


class Resets(IterableDataset):
    """Its own iterator, as many streams are: `iter` starts it again."""

    def __iter__(self) -> "Resets":
        self.rows = iter(range(23))
        return self

    def __next__(self) -> int:
        return next(self.rows)


class Iterates(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        return iter([random.random(), random.random(), torch.rand(()).item()])


@pytest.mark.parametrize(("given", "why"), [
    (lambda: Iterates(Plain(), batch_size=2), "Iterates overrides __iter__"),
    (lambda: DataLoader(Draws(), batch_size=None, shuffle=True), "DataLoader has batch_size=None"),
    (lambda: ["a", 4, 5], "list is not a DataLoader"),
])  # fmt: skip
def test_what_cannot_be_taken_apart_goes_on_where_it_was_and_draws_alike_in_each_process(given, why):
    def some(rank: int, done: int, epoch: int = EPOCH) -> list[Any]:
        division = Division(seed=SEED, rank=rank, world=2, position=lambda: (epoch, done))
        loader = wrap_loader(given(), division)
        assert isinstance(loader, UndividedLoader)
        assert loader.notes == [f"{why}: its batches are not divided, and a resumed run rereads the earlier data"]
        random.seed(rank), torch.manual_seed(rank)
        found = []
        for _, batch in zip(range(3 - done), loader):  # noqa: B905
            found.append(repr(batch))
            random.random(), torch.rand(())  # as a step may
        assert (loader.title, loader.batch_scope) == ("each process computes the same batches", "all")
        return found

    whole = some(0, 0)
    assert some(1, 0) == whole
    assert some(1, 2) == whole[2:]
    assert (some(0, 0, EPOCH + 1) == whole) is (why.startswith("list"))


def test_processes_with_batches_of_their_own_end_together():
    """The others would wait for one that has no more."""
    others = iter(
        [False, True, True, True, False]
    )  # its first batch differs, its length does not, it has a second one, a third, and ends
    loader = wrap_loader([3, 4, 5, 6], Division(seed=SEED, world=2, agree=lambda _: next(others)))
    assert [*loader] == [3, 4]
    assert (loader.title, loader.batch_scope) == ("each process has its own batches", "its own")
    with pytest.raises(StopIteration):
        next(others)
    unequal = wrap_loader([3], Division(seed=SEED, world=2, agree=lambda text: text == "more"))
    assert [*unequal] == [3]
    with pytest.raises(TypeError):
        len(unequal)


STREAMS = [
    {},
    pytest.param({"num_workers": 1, "persistent_workers": True}, marks=pytest.mark.slow),  # torch waits 5 s for its end
    {"num_workers": 2},
    {"drop_last": True},
    {"collate_fn": pads},
    pytest.param({"num_workers": 1, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", STREAMS)
def test_a_stream_is_divided_as_other_data_is(options):
    def some(world: int, accumulate: int, done: int = 0, **more: Any) -> list[list[tuple[float, ...]]]:
        given = [DataLoader(Stream(), batch_size=6, **options) for _ in range(world)]
        place = {"world": world, "accumulate": accumulate, "contiguous": True, **more}
        return joined(
            [Process(each, rank, **place).epoch_from(done) for rank, each in enumerate(given)], accumulate, True
        )

    single = some(1, 1)
    assert indices(single) == list(range(18 if "drop_last" in options else 23))
    for world, accumulate in DIVISIONS if not options else [(2, 2)]:
        assert some(world, accumulate) == single
        assert some(world, accumulate, 2 * accumulate) == single[2:]
    evaluated = some(3, 1, trains=False)
    assert [row for batch in evaluated for row in batch] == [row for batch in some(1, 1, trains=False) for row in batch]


@pytest.mark.parametrize("make_loader", [
    lambda: DataLoader(Resets(), batch_size=6),
    lambda: DataLoader(Resets(), batch_size=6, num_workers=1),
    lambda: DataLoader(range(23), batch_size=6, sampler=Resets()),
    lambda: DataLoader(range(23), batch_sampler=BatchSampler(Resets(), 6, False)),
    Resets,
])  # fmt: skip
def test_an_iterator_that_resets_itself_is_read_to_its_end(make_loader):
    def some(done: int) -> list[int]:
        loader = wrap_loader(make_loader(), Division(seed=SEED, position=lambda: (EPOCH, done)))
        return torch.cat([torch.as_tensor(batch).view(-1) for batch in islice(loader, 30)]).tolist()

    whole = some(0)
    assert whole == [*range(23)]
    assert some(2) == (whole[2:] if make_loader is Resets else whole[12:])


def test_a_worker_of_a_stream_that_stays_reads_the_next_epoch():
    """Its dataset stays too."""
    process = Process(DataLoader(Stream(), batch_size=6, num_workers=1, persistent_workers=True), 1, 2, 1)
    for epoch in range(3):
        process.epoch = epoch
        found = [row for _, share in process.epoch_from() for row in share]
        with IsolatedRandomState(int(key_of("order", SEED, epoch)[0])):
            numbers = [random.random() for _ in range(23)]
        assert [round(1000 * (number - numbers[int(index)])) for index, number in found] == [epoch + 1] * len(found)
    process.loader.close()


class Told(brought.Stream):
    def set_epoch(self, epoch: int) -> None:
        self.begin = epoch

    def __iter__(self) -> Iterator[Row]:
        return (row for row in super().__iter__() if row[0] >= self.begin)


def test_a_stream_is_told_the_epoch():
    process = Process(DataLoader(Told(), batch_size=6), 0, 2, 1)
    assert {row[0] for _, share in process.epoch_from() for row in share} <= {*range(EPOCH, 23)}


def test_generators_of_what_cannot_be_taken_apart_follow_from_the_epoch():
    def drawn(done: int) -> list[int]:
        own = torch.Generator().manual_seed(done)
        given = DataLoader([*range(9)], batch_size=None, shuffle=True, generator=own)
        return [*wrap_loader(given, Division(seed=SEED, position=lambda: (EPOCH, done)))]

    assert drawn(4) == drawn(0)[4:]


class Ranks:
    """What processes that take turns agree on: the first one's texts count."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def agree(self, rank: int, text: str, asked: list[int]) -> bool:
        asked.append(1)
        if rank == 0:
            self.texts.append(text)
        return len(asked) > len(self.texts) or self.texts[len(asked) - 1] == text


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_divides_itself_is_not_divided_again(workers):
    ranks = Ranks()

    def some(rank: int, stream: Stream, done: int = 0) -> Process:
        agree = partial(ranks.agree, rank, asked=[])
        process = Process(DataLoader(stream, batch_size=6, num_workers=workers), rank, 2, 2, agree=agree)
        process.found = process.epoch_from(done)
        return process

    some(0, Stream())
    other = some(1, Stream(differs_from=0))
    assert [(weight, len(share)) for weight, share in other.found] == [(1, 6), (1, 6), (1, 6), (1, 5)]
    assert (
        other.loader.batch_scope == "its own"
        and other.loader.title == "each process has its own batches x 2 accumulated"
    )
    assert other.loader.notes == [
        "Stream is a stream with different samples in each process: its batches are not divided, and a resumed run rereads the earlier data"
    ]
    assert [len(share) for _, share in some(1, Stream(differs_from=0), 3).found] == [5]
    same = some(1, Stream())
    assert len(same.found) == 8 and same.loader.batch_scope == "a share"
    late = some(1, Stream(differs_from=8))  # which strategies find
    assert late.loader.batch_scope == "a share" and len(late.found) == 8


def test_a_stream_that_differs_later_has_another_digest():
    first, same, late = (digests(DataLoader(Stream(begin), batch_size=6)) for begin in (23, 23, 8))
    assert first == same
    assert [mine == theirs for mine, theirs in zip(first, late, strict=True)] == [True, False, False, False]
