"""Streams, and loaders that create their own batches: divided if all processes read the same, left alone otherwise."""

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from dividing import EPOCH, SEED, Process, digests
from packages.brought import Draws, Plain, Row
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lockstep.data.standard import Division
from lockstep.data.streams import wrap_loader
from lockstep.errors import TrainingFailed

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec")


class Stream(IterableDataset):
    """Its numbers show how often it was begun, and in which epoch. Another rank may read different ones from one on."""

    def __init__(self, differs_from: int = 23, count: int = 23, length: int | None = None) -> None:
        self.differs_from, self.count, self.length, self.begun, self.epoch = differs_from, count, length, 0, 0

    def __len__(self) -> int:
        return self.length  # type: ignore[return-value]  # len(...) of None is a TypeError

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Row]:
        self.begun += 1
        for index in range(self.count):
            yield index, random.random() + (index >= self.differs_from) + 10 * self.begun + 100 * self.epoch


class Resets(IterableDataset):
    """Its own iterator, as many streams are: `iter` starts it again."""

    def __iter__(self) -> "Resets":
        self.rows = iter(range(23))
        return self

    def __next__(self) -> int:
        return next(self.rows)


class Iterates(DataLoader):
    own = random.Random()

    def __iter__(self) -> Iterator[Any]:
        return iter([random.random(), self.own.random(), torch.rand(()).item()])


@pytest.mark.parametrize(("make_loader", "why"), [
    (lambda: Iterates(Plain(), batch_size=2), "Iterates overrides __iter__"),
    (lambda: DataLoader(Draws(), batch_size=None, shuffle=True), "DataLoader has batch_size=None"),
    (lambda: ["a", 4, 5], "list is not a DataLoader"),
])  # fmt: skip
def test_undivided_batches_are_the_same_in_each_process(make_loader, why):
    """And resume where they were."""

    def read(rank: int, done: int, epoch: int = EPOCH) -> list[str]:
        loader = wrap_loader(make_loader(), Division(seed=SEED, rank=rank, world=2, position=lambda: (epoch, done)))
        assert loader.notes == [f"{why}: its batches are not divided, and a resumed run rereads the earlier data"]
        random.seed(rank), torch.manual_seed(rank)
        batches = []
        for batch in islice(loader, 3 - done):
            batches.append(repr(batch))
            random.random(), torch.rand(())  # as a step may
        assert (loader.title, loader.batch_scope) == ("each process computes the same batches", "all")
        return batches

    whole = read(0, 0)
    assert read(1, 0) == whole
    assert read(1, 2) == whole[2:]
    assert (read(0, 0, EPOCH + 1) == whole) is (why.startswith("list"))


def test_processes_with_different_batches_end_together():
    """Otherwise they would wait for one that has no more."""
    answers = [False, True, True, True, False]  # to the first batch, the length, and three times whether there are more
    loader = wrap_loader([3, 4, 5, 6], Division(seed=SEED, world=2, agree=lambda _: answers.pop(0)))
    assert [*loader] == [3, 4]
    assert (loader.title, loader.batch_scope, answers) == ("each process has its own batches", "its own", [])
    unequal = wrap_loader([3], Division(seed=SEED, world=2, agree=lambda text: text == "more"))
    assert [*unequal] == [3]
    with pytest.raises(TypeError):
        len(unequal)


@pytest.mark.parametrize("make_loader", [
    lambda: DataLoader(Resets(), batch_size=6),
    lambda: DataLoader(Resets(), batch_size=6, num_workers=1),
    lambda: DataLoader(range(23), batch_size=6, sampler=Resets()),
    lambda: DataLoader(range(23), batch_sampler=BatchSampler(Resets(), 6, False)),
    Resets,
])  # fmt: skip
def test_an_iterator_that_resets_itself_is_read_to_its_end(make_loader):
    def read(done: int) -> list[int]:
        loader = wrap_loader(make_loader(), Division(seed=SEED, position=lambda: (EPOCH, done)))
        return torch.cat([torch.as_tensor(batch).view(-1) for batch in islice(loader, 30)]).tolist()

    assert read(0) == [*range(23)]
    assert read(2) == [*range(2 if make_loader is Resets else 12, 23)]


def test_a_worker_that_stays_begins_a_stream_once_an_epoch():
    """And tells it the epoch."""
    process = Process(DataLoader(Stream(), batch_size=6, num_workers=1, persistent_workers=True), 1, 2)
    for process.epoch in range(3):
        assert {number // 10 for _, number in process.rows_from()} == {10 * process.epoch + process.epoch + 1}
    process.loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_divides_itself_is_not_divided_again(workers):
    texts = ["more", "no more", "None"]  # on which processes agree

    def read(rank: int, differs_from: int, done: int = 0) -> tuple[Any, list[int]]:
        agree = (lambda text: text in texts) if rank else (lambda text: not texts.append(text))
        process = Process(DataLoader(Stream(differs_from), batch_size=6, num_workers=workers), rank, 2, 2, agree=agree)
        return process.loader, [len(share) for _, share in process.epoch_from(done)]

    read(0, 23)
    loader, sizes = read(1, 0)
    assert (loader.batch_scope, sizes) == ("its own", [6, 6, 6, 5])
    assert loader.title == "each process has its own batches x 2 accumulated"
    (note,) = loader.notes
    assert note.startswith("Stream is a stream with different samples in each process: its batches are not divided")
    assert read(1, 0, done=3)[1] == [5]
    for differs_from in (8, 23):
        loader, sizes = read(1, differs_from)
        assert (loader.batch_scope, len(sizes)) == ("a share", 8)
    first, late = (digests(DataLoader(Stream(begin), batch_size=6)) for begin in (23, 8))  # strategies compare them
    assert [mine == theirs for mine, theirs in zip(first, late, strict=True)] == [True, False, False, False]


def test_the_length_of_a_stream_is_an_estimate(caplog):
    """But an epoch without samples is an error."""
    assert len(Process(DataLoader(Stream(length=128), batch_size=8)).epoch_from()) == 3
    assert "Stream yields 3 micro-batches in epoch 4, but declares 16" in caplog.text
    with pytest.raises(TrainingFailed, match="yields 0 micro-batches in epoch 4"):
        Process(DataLoader(Stream(count=0), batch_size=8)).epoch_from()
