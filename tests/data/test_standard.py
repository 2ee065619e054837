"""DataLoaders as people bring them: the same global batches and random numbers for any division, and from any step on."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from dividing import DIVISIONS, EPOCH, SEED, Process, digests, indices, joined, rows
from packages.brought import DIVIDED, Draws, Endless, Plain, Ragged, Row, Stream, Together, masks, pads
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from lockstep.data.loaders import digest_of
from lockstep.data.sampler import permute
from lockstep.data.standard import Division
from lockstep.data.streams import wrap_loader
from lockstep.errors import TrainingFailed, UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec")
LOADERS: dict[str, Callable[[], DataLoader]] = {
    **DIVIDED,
    "a stream, padding": lambda: DataLoader(Stream(), batch_size=6, drop_last=True, collate_fn=pads),
    "a stream, spawned": lambda: DataLoader(Stream(), batch_size=6, num_workers=1, multiprocessing_context="spawn"),
}
IN_PROCESS = [name for name in LOADERS if "workers" not in name and "spawned" not in name]
EVERY = [pytest.param(name, marks=[pytest.mark.slow] * ("spawned" in name)) for name in LOADERS]


# --- What processes get ---


def divided(name: str, world: int, accumulate: int, contiguous: bool, done: int = 0) -> list[list[tuple[float, ...]]]:
    ranks = [Process(LOADERS[name](), rank, world, accumulate, contiguous=contiguous) for rank in range(world)]
    batches = joined([rank.epoch_from(done * accumulate) for rank in ranks], accumulate, contiguous)
    for rank in ranks:
        rank.loader.close()
    return batches


@pytest.mark.parametrize("name", EVERY)
def test_any_division_has_the_batches_of_one_process(name):
    """And from any step on, in shares with the right weights. The random numbers of the process are left alone."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    single = divided(name, 1, 1, True)
    assert len(single) > 0
    assert Process(LOADERS[name]()).loader.length == (None if "stream" in name else len(single))
    for world, accumulate in DIVISIONS if name in IN_PROCESS else [(2, 2)]:
        for contiguous in (True, False):
            assert divided(name, world, accumulate, contiguous) == single
        for step in range(len(single) if name in IN_PROCESS else 0):
            assert divided(name, world, accumulate, False, step) == single[step:]
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


@pytest.mark.parametrize(("batch", "samples", "world", "sizes"), [
    (6, 7, 2, [1, 0]),  # one sample is all there is
    (6, 9, 3, [3, 0, 0]),  # batch norm rejects a single sample, and 6 samples are 2 for each process
    (6, 10, 3, [2, 2, 0]),
    (3, 5, 3, [1, 1, 0]),  # here it never has more
])  # fmt: skip
def test_a_smaller_last_batch_has_no_shares_of_one_sample(batch, samples, world, sizes):
    ranks = [Process(DataLoader(Plain(samples), batch_size=batch), rank, world) for rank in range(world)]
    last = [rank.epoch_from()[-1] for rank in ranks]
    assert [len(share) if weight else 0 for weight, share in last] == sizes
    assert all(len(share) == min(2, max(sizes)) for weight, share in last if not weight)


def test_orders_are_those_that_torch_and_the_sampler_give():
    assert indices(divided("sequential", 2, 1, True)) == list(range(23))
    assert indices(divided("batch sampler", 2, 1, True)) == list(range(18))
    assert indices(divided("a stream, with workers", 1, 1, True)) == list(range(18))
    assert indices(divided("own sampler, a list", 3, 1, True)) == [3, 1, 4, 1, 5, 9, 2]
    assert indices(divided("shuffled", 2, 2, True)) == permute(np.arange(23), 23, SEED, EPOCH).tolist()
    torchs = DistributedSampler(range(23), 1, 0)
    torchs.set_epoch(EPOCH)
    assert indices(divided("distributed", 2, 1, True)) == list(torchs)
    assert [len(batch) for batch in divided("own batch sampler", 3, 2, True)] == [5, 1, 8, 2, 7]
    assert set(indices(divided("weighted", 2, 1, True))) > {20, 21, 22}


@pytest.mark.parametrize("name", ["shuffled", "own sampler", "own sampler, lazy", "weighted", "workers that stay"])
def test_each_epoch_and_seed_has_its_own_order_and_numbers(name):
    process, reseeded = Process(LOADERS[name](), 1, 2), Process(LOADERS[name](), 1, 2, seed=SEED + 1)
    first = process.rows_from()
    process.epoch += 1
    for other in (process.rows_from(), reseeded.rows_from()):
        assert not {*first} & {*other}
        assert indices([first]) != indices([other])
    process.epoch -= 1
    for loader in (process.loader, reseeded.loader):
        assert process.rows_from() == first
        loader.close()


def test_a_sample_that_is_given_twice_draws_twice():
    samples = [row for batch in divided("weighted", 1, 1, True) for row in batch]
    assert len({index for index, _ in samples}) < len({number for _, number in samples}) == len(samples)


def test_a_collate_function_draws_by_micro_batch():
    def epoch(rank: int, workers: int = 0, done: int = 0) -> list[tuple[float, ...]]:
        loader = DataLoader(Draws(), batch_size=6, shuffle=True, collate_fn=masks, num_workers=workers)
        return Process(loader, rank, 2).rows_from(done)

    whole = epoch(1)
    assert whole == epoch(1, workers=2)
    assert whole[6:] == epoch(1, done=2)
    assert len({row[2] for row in epoch(0) + whole}) == 23


class Seeded(Together):
    """PyTorch's idiom for random numbers of NumPy in workers."""

    def number(self, index: int) -> float:
        return float(np.random.default_rng([torch.initial_seed() % 2**32, index]).random())


def collates_seeded(samples: list[Row], most: int) -> list[Row]:
    return [(index, number + torch.initial_seed() % most) for index, number in samples]


@pytest.mark.parametrize("options", [
    {"dataset": Seeded(), "collate_fn": partial(collates_seeded, most=100)},
    {"dataset": Subset(Seeded(), range(23)), "sampler": [*range(23)]},
])  # fmt: skip
def test_initial_seed_follows_the_sample_not_the_worker(options):
    def numbers(workers: int, seed: int, epoch: int = EPOCH, done: int = 0) -> list[tuple[float, ...]]:
        torch.manual_seed(seed)
        return Process(DataLoader(batch_size=6, num_workers=workers, **options), epoch=epoch).rows_from(done)

    whole = numbers(0, 5)
    assert numbers(0, 6) == numbers(2, 7) == whole
    assert numbers(0, 8, done=2) == whole[12:]
    assert not {*whole} & {*numbers(0, 5, EPOCH + 1)}
    assert torch.initial_seed() == 5


class Yields(Sampler):
    """What a function returns. Declares any length, or none."""

    def __init__(self, elements: Callable[[], Any], length: int | None = None) -> None:
        self.elements, self.length = elements, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements())

    def __len__(self) -> int:
        return self.length  # type: ignore[return-value]  # len(...) of None is a TypeError


class InPlace(Yields):
    """Shuffles its own list, as many samplers do: the order of an epoch depends on the earlier ones."""

    def __init__(self, rounds: int = 1) -> None:
        super().__init__(self.shuffled, 23)
        self.order, self.rounds = [*range(23)], rounds

    def shuffled(self) -> Iterator[int]:
        for _ in range(self.rounds):
            random.shuffle(self.order)
            yield from self.order


@pytest.mark.parametrize("options", [
    lambda: {"batch_size": 6, "sampler": InPlace()},
    lambda: {"batch_size": 6, "sampler": InPlace(rounds=99)},  # more than it declares
    lambda: {"batch_sampler": Yields(Ragged(InPlace()).__iter__, 3)},  # of its five
])  # fmt: skip
def test_a_resume_repeats_earlier_epochs_of_a_sampler(options):
    def begun(epoch: int, **more: Any) -> Process:
        return Process(DataLoader(Draws(), **options()), 1, 2, epoch=epoch, **more)

    whole, process = [], begun(0)
    for process.epoch in range(4):
        whole.append(process.epoch_from())
        assert len(whole[-1]) == len(process.loader)
    assert whole[3] != whole[2]
    assert [begun(epoch).epoch_from(2) for epoch in range(4)] == [batches[2:] for batches in whole]
    assert begun(3, reload_every=1).epoch_from() != whole[3]  # a Trainer creates its loaders in each epoch


# --- Several loaders, and those without an end ---

SECOND: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Draws(), batch_size=8, shuffle=True),
    "without a length": lambda: DataLoader(Draws(), batch_size=8, sampler=Yields(lambda: torch.randperm(23)[:20])),
    "a stream": lambda: DataLoader(Stream(), batch_size=8),
    "left alone": lambda: [[(float(i), 0.0)] for i in range(3)],
}


def combined(mode: str, second: str, done: int, ahead: int) -> Iterator[list]:
    """Two loaders of 4 and 3 batches, as the Trainer takes turns with them: rows, or None."""
    from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    division = Division(seed=SEED, position=lambda: (EPOCH, done), number=lambda loader: loaders.index(loader))
    loaders = [wrap_loader(loader, division) for loader in (LOADERS["shuffled"](), SECOND[second]())]
    fetcher = _PrefetchDataFetcher(ahead)  # Lightning prefetches one batch if it does not know the length
    fetcher.setup(CombinedLoader(loaders, mode))
    fetcher.length = None  # as if a loader has none
    for batches, _, _ in fetcher:
        yield [None if batch is None else rows(batch) for batch in batches]
        done += 1


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize(("mode", "count"), [("min_size", 3), ("max_size", 4), ("max_size_cycle", 4)])
def test_loaders_that_train_together_resume_at_any_step(mode, count, second):
    for ahead in (0, 1):
        whole = [*combined(mode, second, 0, ahead)]
        assert len(whole) == count
        for done in range(count):
            assert [*combined(mode, second, done, ahead)][: count - done] == whole[done:]
    first, other = zip(*whole, strict=True)
    assert indices(first[:3])[:18] != indices(other[:3])[:18]
    assert (other[-1] is None) is (mode == "max_size")
    if mode == "max_size_cycle" and second != "left alone":  # a new order and new random numbers
        assert not {*other[3]} & {row for batch in other[:3] for row in batch}


def test_one_process_may_look_at_its_batches():
    """Nothing changes. The other processes answer once: when the loader is created."""
    answers = [True]
    process = Process(LOADERS["workers"](), 0, 2, 2, agree=lambda _: answers.pop())
    for process.done, (_, share) in enumerate(Process(LOADERS["workers"](), 0, 2, 2).epoch_from()):
        assert rows(next(iter(process.loader))) == share


def test_a_sampler_without_an_end():
    def batches(rank: int, world: int, **more: Any) -> list[tuple[float, list[tuple[float, ...]]]]:
        loader = Process(DataLoader(Draws(), batch_size=6, sampler=Endless()), rank, world, **more).loader
        assert loader.length is None
        return [(loader.batch_info[i].weight, rows(batch)) for i, batch in enumerate(islice(loader, 9))]

    single = joined([batches(0, 1)], 1, True)
    for trains in (True, False):
        assert joined([batches(rank, 2, trains=trains) for rank in (0, 1)], 1, True) == single


# --- Evaluation ---


@pytest.mark.parametrize("name", IN_PROCESS)
@pytest.mark.parametrize("world", [2, 3, 5])
def test_an_evaluation_has_each_sample_once(name, world):
    """And as many batches in each process."""
    whole = Process(LOADERS[name](), trains=False).rows_from()
    ranks = [Process(LOADERS[name](), rank, world, trains=False) for rank in range(world)]
    for _ in range(2):
        shares = [rank.epoch_from() for rank in ranks]
        assert {rank.loader.length for rank in ranks} == {None if "stream" in name else len(shares[0])}
        assert all(share and weight for batches in shares for weight, share in batches)  # no sample is repeated
        assert [row for batch in joined(shares, 1, True) for row in batch] == whole


def test_an_evaluation_joins_only_batches_that_are_too_small():
    ranks = [Process(DataLoader(Plain(5)), rank, 2, trains=False).epoch_from() for rank in (0, 1)]
    assert [[len(share) for _, share in rank] for rank in ranks] == [[1, 2], [1, 1]]
    told = r"2 samples of an evaluation cannot be divided among 3 processes or logical ranks\. .*trainer\.devices=2"
    with pytest.raises(UserError, match=told):
        Process(DataLoader(Plain(2)), 0, 3, trains=False)


# --- What is the user's, and what is rejected ---


def test_batches_of_tensors_are_those_that_torch_collates():
    """A sampler may yield tensors, and the tensors may change between two batches."""
    data = TensorDataset(torch.rand(3, 2, 4).mT, torch.rand(3) > 0.5)
    for order in ([2, 0, 1], np.uint8([2, 0, 1]), torch.tensor([[2], [0], [1]])):
        given = DataLoader(data, 2, sampler=order)
        for expected, batch in zip(given, Process(given).loader, strict=True):
            assert type(batch) is type(expected) and all(map(torch.equal, batch, expected))
            assert batch[0].stride() == expected[0].stride()
            data.tensors[0].neg_()


def test_pinned_batches_keep_what_is_known_of_them(monkeypatch):
    """As with a GPU: torch pins what the loader returns, and turns its tuples into lists."""
    for module in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)
    data = TensorDataset(torch.arange(4), torch.arange(4))
    loader = Process(DataLoader(data, batch_size=2, pin_memory=True)).loader
    assert [type(batch) for batch in loader] == [list, list]
    assert {info.places for info in loader.batch_info.values()} == {range(2), range(2, 4)}


def keeps_seed(worker: int) -> None:
    get_worker_info().dataset.kept = (worker, torch.initial_seed())


def shows_kept(samples: list[Row]) -> list[tuple[Any, ...]]:
    info = get_worker_info()
    return [(index, info.id, *info.dataset.kept) for index, _ in samples]


def test_workers_begin_with_the_users_function_and_dataset():
    """A seed that it keeps is that of every worker, and follows from the run's seed and the epoch."""

    def kept_seed(**more: Any) -> int:
        options = {"num_workers": 2, "worker_init_fn": keeps_seed, "collate_fn": shows_kept}
        seen = Process(DataLoader(Plain(), batch_size=6, **options), **more).rows_from()
        assert indices([seen]) == list(range(23))
        assert {row[1:3] for row in seen} == {(0, 0), (1, 1)}
        (seed,) = {row[3] for row in seen}
        return seed

    assert kept_seed() == kept_seed()
    assert len({kept_seed(), kept_seed(epoch=0), kept_seed(seed=0)}) == 3


def test_a_loader_has_the_users_batches_and_attributes():
    given = DataLoader(Plain(), batch_size=6, collate_fn=frozenset)
    loader = Process(given).loader
    assert [*loader] == [*given]
    assert (loader.dataset, loader.batch_size, loader.collate_fn) == (given.dataset, 6, frozenset)
    assert not hasattr(loader, "nothing")


def test_the_first_lines_say_how_a_batch_is_divided():
    title = lambda name, *place: Process(LOADERS[name](), 0, *place).loader.title  # noqa: E731
    assert title("shuffled", 2, 1) == "batch 6 = 2 x 3"
    assert title("shuffled", 2, 2) == "batch 6 = 2 x 1 or 2 x 2 accumulated"
    assert title("no batch size", 2, 1) == "batch 1 = 2 x 0 or 1"
    assert title("own batch sampler", 2, 1) == "batches of Draws with Ragged, divided by 2"
    assert [name for name in LOADERS if Process(LOADERS[name]()).loader.notes and "stream" not in name] == ["padding"]
    given = DataLoader(Plain(), batch_size=7, shuffle=True, generator=torch.Generator())
    size, generator = Process(given, 0, 2).loader.notes
    assert size.startswith("batch_size=7 is the global batch and not divisible by 2")
    assert generator.startswith("the generator of the DataLoader is ignored")


def test_a_sampler_that_cannot_be_repeated_is_noted_once():
    def notes(sampler: Sampler) -> list[str]:
        data = sampler.data = Plain()
        data.file = (line for line in ())  # cannot be copied, nor is it compared
        return Process(DataLoader(Subset(data, range(23)), batch_size=6, sampler=sampler)).loader.notes

    assert notes(InPlace()) == []
    (note,) = notes(Yields(lambda: np.random.default_rng().permutation(23).tolist(), 23))
    assert note.startswith("Yields returns different samples for the same seed")


def test_digests_differ_from_the_first_different_batch_on():
    """What strategies compare: see tests/training/test_custom_module.py."""
    loader = lambda sampler: DataLoader(Draws(), batch_size=2, sampler=sampler)  # noqa: E731
    first, second = (digests(loader([*range(8)]), rank) for rank in (0, 1))
    assert first == second
    assert len({*first}) == 3  # it has asked for 1, 2, 4 and 8 samples
    other = digests(loader([0, 1, 2, 3, 4, 7, 6, 5]))
    assert [mine == theirs for mine, theirs in zip(first, other, strict=True)] == [True, False, False, False]
    assert not {*digests(loader([1, 0, *range(2, 8)]))} & {*first}  # a difference stays
    shuffled = lambda count: DataLoader(Plain(count), batch_size=6, shuffle=True)  # noqa: E731
    assert digests(shuffled(12)) == digests(shuffled(12), 1) != digests(shuffled(11))
    value = lambda x: {"tensor": torch.tensor([x, 3 - x])}  # noqa: E731  # all have the same sum
    one, two = value(1), value(1)
    assert digest_of([one, one]) == digest_of([one, two]) != digest_of([one, value(2)])


def test_data_that_differs_by_process_is_rejected():
    texts: list[str] = []
    shard = lambda rank: DataLoader(Subset(Plain(), range(rank, 22, 2)), batch_size=4, shuffle=True)  # noqa: E731
    Process(shard(0), 0, 2, agree=lambda text: not texts.append(text))
    with pytest.raises(UserError, match="Subset with RandomSampler returns different samples in each process"):
        Process(shard(1), 1, 2, agree=lambda text: text in texts)
    with pytest.raises(UserError, match="list returns different samples in each process"):
        Process(DataLoader(Plain(), sampler=[1, 2, 3]), 1, 2, trains=False, agree=lambda _: False)
    entropy = DataLoader(Plain(), batch_size=4, collate_fn=lambda _: np.random.default_rng().random())
    assert [*Process(entropy, 1, 2, agree=lambda text: text == "").loader]  # it cannot be compared


def test_data_that_divides_itself_is_rejected(monkeypatch):
    class Reader(Plain):
        def __len__(self) -> int:
            return 23 // torch.distributed.get_world_size()

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="Reader has 11 samples in each of 2 processes and 23 in one"):
        Process(DataLoader(Reader(), batch_size=4), 0, 2)


@pytest.mark.parametrize("world", [1, 2])
def test_an_epoch_shorter_than_declared_is_an_error(world):
    sampler = {"batch_size": 8, "sampler": Yields(lambda: range(64), 128)}
    batch_sampler = {"batch_sampler": Yields(lambda: [[0, 1]] * 8, 16)}
    for options, trains in ((sampler, True), (sampler, False), (batch_sampler, True)):
        told = r"Plain with Yields yields 8 micro-batches in epoch \d, but declares 16"
        with pytest.raises(TrainingFailed, match=told):
            Process(DataLoader(Plain(128), **options), 0, world, trains=trains).epoch_from()
