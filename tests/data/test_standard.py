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
from packages import brought
from packages.brought import LOADERS, Draws, Endless, Plain, Ragged, Row, masks
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, RandomSampler, Sampler, Subset, TensorDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from lockstep.data.loaders import digest_of
from lockstep.data.sampler import permute
from lockstep.data.standard import Division
from lockstep.data.streams import wrap_loader
from lockstep.errors import TrainingFailed, UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec")
SLOW = {"spawned"}
IN_PROCESS = [name for name in LOADERS if "workers" not in name and name not in SLOW]
EVERY = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LOADERS]


# --- What processes get ---


def divided(name: str, world: int, accumulate: int, contiguous: bool, done: int = 0) -> list[list[tuple[float, ...]]]:
    ranks = [Process(LOADERS[name](), rank, world, accumulate, contiguous=contiguous) for rank in range(world)]
    found = joined([each.epoch_from(done * accumulate) for each in ranks], accumulate, contiguous)
    for each in ranks:
        each.loader.close()
    return found


@pytest.mark.parametrize("name", EVERY)
def test_any_division_has_the_batches_of_one_process(name):
    """And from any step on, and leaves the random numbers of the process."""
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    single = divided(name, 1, 1, True)
    assert len(single) == len(Process(LOADERS[name](), 0, 1, 1).loader) > 0
    rest = {} if "workers" in name or name in SLOW else {step: single[step:] for step in range(len(single))}
    for world, accumulate in DIVISIONS if rest else [(2, 2)]:
        for contiguous in (True, False):
            assert divided(name, world, accumulate, contiguous) == single
        for step, batches in rest.items():
            assert divided(name, world, accumulate, False, step) == batches
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


@pytest.mark.parametrize("name", IN_PROCESS)
def test_weights_are_those_of_the_mean_over_the_global_batch(name):
    for world, accumulate in DIVISIONS:
        place = {"world": world, "accumulate": accumulate, "contiguous": True}
        ranks = [Process(LOADERS[name](), rank, **place).epoch_from() for rank in range(world)]
        parts = world * accumulate
        for step in range(0, len(ranks[0]), accumulate):
            shares = [micro for found in ranks for micro in found[step : step + accumulate]]
            samples = [len(share) for weight, share in shares if weight]
            assert max(samples) - min(samples) <= 1
            for weight, share in shares:
                assert weight == (pytest.approx(len(share) * parts / sum(samples)) if weight else 0)
                assert len(share) <= 2 or weight
            assert ranks[0][step][0] > 0  # rank 0, which logs, has a sample


@pytest.mark.parametrize(("batch", "samples", "world", "found"), [
    (6, 7, 2, [1, 0]),  # one sample is all there is
    (6, 9, 3, [3, 0, 0]),  # batch norm refuses a single sample, and 6 samples are 2 for each process
    (6, 10, 3, [2, 2, 0]),
    (3, 5, 3, [1, 1, 0]),  # here it never has more
])  # fmt: skip
def test_a_smaller_last_batch_is_not_cut_into_shares_of_one_sample(batch, samples, world, found):
    ranks = [
        Process(DataLoader(Plain(samples), batch_size=batch), rank, world, 1).epoch_from() for rank in range(world)
    ]
    assert [len(share) if weight else 0 for weight, share in (each[-1] for each in ranks)] == found
    assert {len(share) for weight, share in (each[-1] for each in ranks) if not weight} <= {
        min(2, batch // world, samples % batch)
    }


def test_orders_are_those_that_torch_and_the_sampler_give():
    assert indices(divided("sequential", 2, 1, True)) == list(range(23))
    assert indices(divided("batch sampler", 2, 1, True)) == list(range(18))
    assert indices(divided("own sampler, a list", 3, 1, True)) == [3, 1, 4, 1, 5, 9, 2]
    assert indices(divided("shuffled", 2, 2, True)) == permute(np.arange(23), 23, SEED, EPOCH).tolist()
    torchs = DistributedSampler(range(23), 1, 0)
    torchs.set_epoch(EPOCH)
    assert indices(divided("distributed", 2, 1, True)) == list(torchs)
    assert [len(batch) for batch in divided("own batch sampler", 3, 2, True)] == [5, 1, 8, 2, 7]
    assert set(indices(divided("weighted", 2, 1, True))) > {20, 21, 22}


@pytest.mark.parametrize("name", ["shuffled", "own sampler", "own sampler, lazy", "weighted", "workers that stay"])
def test_each_epoch_and_seed_has_its_own_order_and_random_numbers(name):
    process = Process(LOADERS[name](), 1, 2, 1)
    found = [process.epoch_from()]
    process.epoch += 1
    found.append(process.epoch_from())
    process.epoch -= 1
    assert process.epoch_from() == found[0]
    process.loader.close()
    assert process.epoch_from() == found[0]
    process.loader.close()
    drawn = [{row for _, share in epoch for row in share} for epoch in found]
    assert not drawn[0] & drawn[1]
    assert [share[0][0] for _, share in found[0]] != [share[0][0] for _, share in found[1]]


class Seeded(Plain):
    """PyTorch's idiom for random numbers of NumPy in workers."""

    def number(self, index: int) -> float:
        return float(np.random.default_rng([torch.initial_seed() % 2**32, index]).random())


class SeededTogether(Seeded):
    def __getitems__(self, indices: list[int]) -> list[Row]:
        return [self[index] for index in indices]


def collates_seeded(samples: list[Row]) -> list[Row]:
    return [(index, number + torch.initial_seed() % 100) for index, number in samples]


@pytest.mark.parametrize("loader", [
    partial(DataLoader, Seeded()),
    partial(DataLoader, SeededTogether()),
    partial(DataLoader, Seeded(), collate_fn=collates_seeded),
    partial(DataLoader, Subset(Seeded(), range(23)), sampler=[*range(23)]),
])  # fmt: skip
def test_initial_seed_follows_the_sample_not_the_worker(loader):
    def numbers(workers: int, seed: int, epoch: int = EPOCH, done: int = 0) -> list[Row]:
        torch.manual_seed(seed)
        process = Process(loader(batch_size=6, num_workers=workers), 0, 1, 1)
        process.epoch = epoch
        return [row for _, share in process.epoch_from(done) for row in share]

    whole = numbers(0, 5)
    assert numbers(0, 6) == numbers(2, 7) == whole and numbers(0, 8, done=2) == whole[12:]
    assert not {*whole} & {*numbers(0, 5, EPOCH + 1)}
    assert torch.initial_seed() == 5


class Kept(Plain):
    def number(self, index: int) -> float:
        return float(np.random.default_rng([self.seed, index]).random())


def keeps_seed(_: int) -> None:
    get_worker_info().dataset.seed = torch.initial_seed()


def test_a_seed_kept_by_worker_init_fn_is_that_of_every_worker():
    loaders = [DataLoader(Kept(), batch_size=6, num_workers=n, worker_init_fn=keeps_seed) for n in (1, 2)]
    one, two = (Process(loader, 0, 1, 1).epoch_from() for loader in loaders)
    assert one == two


class InPlace(Sampler):
    """Shuffles a list of its own, as many samplers do, so an epoch's order follows from those before."""

    def __init__(self) -> None:
        self.order, self.turns = [*range(23)], 0

    def __len__(self) -> int:
        return 23

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        self.turns += 1
        yield from self.order[self.turns :]
        yield from self.order[: self.turns]


class EndlessInPlace(InPlace):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from super().__iter__()


class BatchesInPlace(InPlace):
    def __iter__(self) -> Iterator[list[int]]:
        order = [*super().__iter__()]
        yield from (order[i : i + 6] for i in range(0, 23, 6))

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("options", [
    {"batch_size": 6, "sampler": InPlace},
    {"batch_size": 6, "sampler": EndlessInPlace},
    {"batch_sampler": BatchesInPlace},
    {"batch_sampler": lambda: Ragged(InPlace())},
])  # fmt: skip
def test_a_resume_repeats_earlier_epochs_of_a_sampler(options):
    def begun(epoch: int) -> Process:
        process = Process(DataLoader(Draws(), **{k: v() if callable(v) else v for k, v in options.items()}), 1, 2, 1)
        process.epoch = epoch
        return process

    whole, process = [], begun(0)
    for process.epoch in range(4):
        whole.append(process.epoch_from())
    assert whole[3] != whole[2]
    assert [begun(epoch).epoch_from(2) for epoch in range(4)] == [found[2:] for found in whole]
    made_anew = begun(3)  # by a Trainer that makes its loaders anew in each epoch
    made_anew.loader.order.reload_every = 1
    assert made_anew.epoch_from() != whole[3]


def test_a_sample_that_is_given_twice_draws_twice():
    found = [row for batch in divided("weighted", 1, 1, True) for row in batch]
    assert len({index for index, _ in found}) < len({number for _, number in found}) == len(found)


def test_a_collate_function_draws_by_micro_batch():
    def epoch(rank: int, workers: int, done: int = 0) -> list:
        loader = DataLoader(Draws(), batch_size=6, shuffle=True, collate_fn=masks, num_workers=workers)
        return Process(loader, rank, 2, 1).epoch_from(done)

    whole = epoch(1, 0)
    assert whole == epoch(1, 2)
    assert whole[2:] == epoch(1, 0, 2)
    drawn = [row[2] for rank in (0, 1) for _, share in epoch(rank, 0) for row in share]
    assert len(set(drawn)) == len(drawn) == 23


# --- Several loaders, and those without an end ---


class Position:
    done = 0


class Unmeasured(Sampler):
    """20 samples, but it does not say so."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(23)[:20].tolist())


SECOND: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Draws(23), batch_size=8, shuffle=True),
    "without a length": lambda: DataLoader(Draws(23), batch_size=8, sampler=Unmeasured()),
    "a stream": lambda: DataLoader(brought.Stream(), batch_size=8),
    "left alone": lambda: [[(float(i), 0.0)] for i in range(3)],
}


def combined(mode: str, second: str, done: int, ahead: int) -> Iterator[list]:
    """Two loaders of 4 and 3 batches, as the Trainer takes turns with them: lists of indices, or None."""
    from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    place = Position()
    place.done = done
    givens = [DataLoader(Draws(23), batch_size=6, shuffle=True), SECOND[second]()]
    numbers: dict[int, int] = {}
    division = Division(seed=SEED, position=lambda: (EPOCH, place.done), number=lambda loader: numbers[id(loader)])
    loaders = [wrap_loader(given, division) for given in givens]
    numbers |= {id(loader): number for number, loader in enumerate(loaders)}
    together = CombinedLoader(loaders, mode)
    fetcher = _PrefetchDataFetcher(ahead)  # Lightning fetches one where it does not know the length
    fetcher.setup(together)
    fetcher.length = None  # as where a loader has none
    for batches, _, _ in fetcher:
        yield [None if batch is None else rows(batch) for batch in batches]
        place.done += 1


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize(("mode", "count"), [("min_size", 3), ("max_size", 4), ("max_size_cycle", 4)])
def test_loaders_that_train_together_continue_where_they_were(mode, count, second, ahead):
    whole = [*combined(mode, second, 0, ahead)]
    assert len(whole) == count
    for done in range(count):
        assert [*combined(mode, second, done, ahead)][: count - done] == whole[done:]
    first, other = zip(*whole, strict=True)
    assert indices(first[:3])[:18] != indices(other[:3])[:18]
    assert (other[-1] is None) is (mode == "max_size")
    if mode == "max_size_cycle" and second != "left alone":  # another order and other random numbers
        assert not {*other[3]} & {row for batch in other[:3] for row in batch}


@pytest.mark.parametrize("name", ["shuffled", "own sampler, lazy", "workers"])
def test_one_process_may_look_at_its_batches(name):
    """Without the others, and nothing changes."""
    whole = Process(LOADERS[name](), 0, 2, 2).epoch_from()
    others = [True]  # they answer when the loader is made: it compares what processes read
    process = Process(LOADERS[name](), 0, 2, 2, agree=lambda _: others.pop())
    for weight, share in whole:
        assert rows(next(iter(process.loader))) == share
        assert process.loader.batch_info[process.done].weight == weight
        process.done += 1


def test_a_sampler_without_an_end():
    loader = lambda: DataLoader(Draws(), batch_size=6, sampler=Endless())  # noqa: E731
    ranks = [Process(loader(), rank, 2, 1) for rank in (0, 1)]
    for trains in (True, False):
        with pytest.raises(TypeError):
            len(Process(loader(), 0, 2, 1, trains=trains).loader)
    first = [
        [(each.loader.batch_info[i].weight, rows(batch)) for i, batch in enumerate(islice(each.loader, 9))]
        for each in ranks
    ]
    single = Process(loader(), 0, 1, 1)
    batches = [rows(batch) for _, batch in zip(range(9), single.loader)]  # noqa: B905
    assert joined(first, 1, True) == batches


# --- Evaluation ---


@pytest.mark.parametrize("name", IN_PROCESS)
@pytest.mark.parametrize("world", [2, 3, 5])
def test_an_evaluation_has_each_sample_once_and_as_many_batches_in_each_process(name, world):
    whole = [row for _, batch in Process(LOADERS[name](), 0, 1, 1, trains=False).epoch_from() for row in batch]
    ranks = [Process(LOADERS[name](), rank, world, 1, trains=False) for rank in range(world)]
    found = [each.epoch_from() for each in ranks]
    assert {len(batches) for batches in found} == {len(each.loader) for each in ranks}
    assert all(share and weight for batches in found for weight, share in batches)  # nothing marks what repeats others
    assert [row for batch in joined(found, 1, True) for row in batch] == whole
    assert joined([each.epoch_from() for each in ranks], 1, True) == joined(found, 1, True)


def test_an_evaluation_of_too_few_samples_is_refused():
    told = r"2 samples of an evaluation cannot be divided among 3 processes or logical ranks\. .*trainer\.devices=2"
    with pytest.raises(UserError, match=told):
        len(Process(DataLoader(Plain(2)), 0, 3, 1, trains=False).loader)


def test_samples_of_an_evaluation_that_cannot_be_one_batch_are_found_before_it():
    """Shapes differ, so batches have one sample, and of three samples two processes cannot compute as many batches."""
    sizes = lambda count: DataLoader([torch.zeros(size + 1) for size in range(count)])  # noqa: E731
    ranks = [Process(sizes(4), rank, 2, 1, trains=False).loader for rank in (0, 1)]
    assert [[batch.shape[1] for batch in rank] for rank in ranks] == [[1, 3], [2, 4]]
    padding = DataLoader(
        [torch.zeros(size + 1) for size in range(5)], collate_fn=partial(pad_sequence, batch_first=True)
    )
    assert [batch.shape[1] for batch in Process(padding, 0, 2, 1, trains=False).loader] == [1, 4]


# --- What is the user's, and what is refused ---

SEEN: list[Any] = []


class Batch(list):
    def pin_memory(self) -> "Batch":
        return self


def shows_worker(samples: list[Row]) -> list[tuple[int, float, float]]:
    info = get_worker_info()
    return [(info.id, info.dataset.batch_info, index) for index, _ in samples]


def tells(number: float, worker: int) -> None:
    get_worker_info().dataset.batch_info = number + worker


def test_pinning_rebuilds_tuples_and_leaves_what_is_known_of_a_micro_batch(monkeypatch):
    """As where there is a GPU: torch pins what the loader gives, and tuples become lists."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)
    data = TensorDataset(torch.arange(4), torch.arange(4))
    loader = Process(DataLoader(data, batch_size=2, pin_memory=True), 0, 1, 1).loader
    assert [type(batch) for batch in loader] == [list, list]
    assert {each.places for each in loader.batch_info.values()} == {range(2), range(2, 4)}


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_see_the_users_dataset_and_begin_with_the_users_function(context):
    options = {"num_workers": 2, "worker_init_fn": partial(tells, 0.5), "multiprocessing_context": context}
    process = Process(DataLoader(Plain(), batch_size=6, collate_fn=shows_worker, **options), 0, 1, 1)
    found = [row for _, batch in process.epoch_from() for row in batch]
    assert {(worker, told) for worker, told, _ in found} == {(0, 0.5), (1, 1.5)}
    assert [index for *_, index in found] == list(range(23))


def test_a_batch_is_what_the_collate_function_returns_and_the_loader_has_the_users_attributes():
    batches = []

    def collate(samples: list[Row]) -> Batch:
        batches.append(Batch(np.array(sample) for sample in samples))
        return batches[-1]

    given = DataLoader(Plain(), batch_size=6, collate_fn=collate)
    loader = Process(given, 0, 1, 1).loader
    batches.clear()  # those that show whether the data can be seeded
    assert all(found is made for found, made in zip(loader, batches, strict=True))
    assert (loader.dataset, loader.batch_size, loader.collate_fn) == (given.dataset, 6, collate)
    with pytest.raises(AttributeError):
        _ = loader.nothing


def test_the_first_lines_say_how_a_batch_is_divided():
    title = lambda name, *place: Process(LOADERS[name](), 0, *place).loader.title  # noqa: E731
    assert title("shuffled", 2, 1) == "batch 6 = 2 x 3"
    assert title("shuffled", 2, 2) == "batch 6 = 2 x 1 or 2 x 2 accumulated"
    assert title("no batch size", 2, 1) == "batch 1 = 2 x 0 or 1"
    assert title("own batch sampler", 2, 1) == "batches of Draws with Ragged, divided by 2"
    notes = {name: Process(LOADERS[name](), 0, 1, 1).loader.notes for name in LOADERS}
    assert [name for name in notes if notes[name]] == ["padding"]
    (told,) = Process(LOADERS["no batch size"](), 0, 2, 2).loader.notes
    assert told.startswith("batch_size=1 is the global batch and not divisible by 4") and told.endswith("may be empty")


def test_a_sampler_that_depends_on_the_process_has_another_digest_from_the_first_difference_on():
    """What strategies compare: see tests/training/test_custom_module.py."""
    loader = lambda sampler: DataLoader(Draws(), batch_size=2, sampler=sampler)  # noqa: E731
    same = [digests(loader([*range(8)]), rank) for rank in (0, 1)]
    assert same[0] == same[1] and len({*same[0]}) == 3  # asked for 1, 2, 4 and 8 samples
    other = digests(loader([0, 1, 2, 3, 4, 7, 6, 5]))
    assert [mine == theirs for mine, theirs in zip(same[0], other, strict=True)] == [True, False, False, False]
    assert not {*digests(loader([*range(1, 9)]))} & {*same[0]}
    shuffled = lambda count: DataLoader(Plain(count), batch_size=6, shuffle=True)  # noqa: E731
    assert digests(shuffled(12)) == digests(shuffled(12), 1) != digests(shuffled(11))


def test_an_evaluation_whose_sampler_depends_on_the_process_is_refused_before_it():
    with pytest.raises(UserError, match="list returns different samples in each process"):
        Process(DataLoader(Plain(), sampler=[1, 2, 3]), 1, 2, 1, trains=False, agree=lambda _: False)


def test_a_batch_sampler_that_gives_more_than_its_length_ends_there():
    class Short(Ragged):
        def __len__(self) -> int:
            return 3

    loader = lambda: DataLoader(Draws(), batch_sampler=Short())  # noqa: E731
    whole = Process(loader(), 0, 1, 1).epoch_from()
    assert len(whole) == 3 and Process(loader(), 0, 1, 1).epoch_from(2) == whole[2:]


class Half(Sampler):
    """64 of the 128 samples that it declares, and none in a second epoch."""

    def __init__(self) -> None:
        self.left = iter(range(64))

    def __len__(self) -> int:
        return 128

    def __iter__(self) -> Iterator[int]:
        return self.left


class Stops(Plain):
    def number(self, index: int) -> float:
        if index == 64:
            raise StopIteration
        return super().number(index)


class ShorterBatches(Ragged):
    def __len__(self) -> int:
        return 16


class Declares(brought.Stream):
    def __init__(self) -> None:
        self.rows = iter([*super().__iter__()])

    def __iter__(self) -> Iterator[Row]:
        return self.rows

    def __len__(self) -> int:
        return 128


@pytest.mark.parametrize(("make_loader", "evaluates", "told"), [
    (lambda: DataLoader(Plain(128), batch_size=8, sampler=Half()), True, "Plain with Half yields 8 micro-batches in epoch 1, but declares 16"),
    (lambda: DataLoader(Stops(128), batch_size=8, num_workers=2), True, "yields 8 micro-batches in epoch 1, but declares 16"),
    (lambda: DataLoader(Plain(), batch_sampler=ShorterBatches()), False, "Plain with ShorterBatches yields 5 micro-batches in epoch 1, but declares 16"),
])  # fmt: skip
@pytest.mark.parametrize("world", [1, 2])
def test_an_epoch_shorter_than_declared_is_an_error(make_loader, evaluates, told, world):
    for trains in (True, False) if evaluates or world == 1 else (True,):
        with pytest.raises(TrainingFailed, match=told):
            process = Process(make_loader(), 0, world, 1, trains=trains)
            process.epoch = 0
            process.epoch_from()


def test_the_length_of_a_stream_is_an_estimate_but_not_of_nothing(caplog):
    process = Process(DataLoader(Declares(), batch_size=8), 0, 1, 1)
    assert len(process.epoch_from()) == 3
    assert "Declares yields 3 micro-batches in epoch 4, but declares 16" in caplog.text
    with pytest.raises(TrainingFailed, match="yields 0 micro-batches in epoch 4"):
        process.epoch_from()


class Entropic(Plain):
    def number(self, index: int) -> float:
        return float(np.random.default_rng().random())


def test_datasets_that_differ_by_process_are_refused():
    told: list[str] = []
    shard = lambda rank: DataLoader(Subset(Plain(), range(rank, 22, 2)), batch_size=4, shuffle=True)  # noqa: E731
    Process(shard(0), 0, 2, 1, agree=lambda text: told.append(text) or True)
    with pytest.raises(UserError, match="Subset with RandomSampler returns different samples in each process"):
        Process(shard(1), 1, 2, 1, agree=lambda text: text in told)
    entropy = DataLoader(Entropic(), batch_size=4)  # nobody can compare them
    assert Process(entropy, 1, 2, 1, agree=lambda text: text == "").epoch_from()


def test_the_first_lines_say_what_a_batch_size_and_a_generator_do():
    given = DataLoader(Plain(), batch_size=7, shuffle=True, generator=torch.Generator())
    gathered, generator = Process(given, 0, 2, 1).loader.notes
    assert gathered.startswith(
        "batch_size=7 is the global batch and not divisible by 2: micro-batches have several sizes"
    )
    assert generator.startswith("the generator of the DataLoader is ignored")


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize("form", [
    lambda x: torch.arange(3) + x,
    lambda x: np.arange(12, dtype=np.uint8).reshape(2, 2, 3) + x,
    lambda x: {"a": [None, (x, 2.0)]},
    lambda x: Holder({"tensor": torch.tensor([x, 3 - x])}),  # with the same sum
    lambda x: Image.new("L", (2, 2), x),
])  # fmt: skip
def test_a_digest_follows_from_content(form):
    assert digest_of(form(1)) == digest_of(form(1)) != digest_of(form(2))
    one, two = form(1), form(1)
    assert digest_of([one, one]) == digest_of([one, two]) != digest_of([one])


def test_seeds_of_workers_follow_the_run_and_the_epoch():
    def drawn(seed: int, epoch: int) -> int:
        loader = wrap_loader(DataLoader(torch.arange(4), num_workers=1), Division(seed=seed))
        loader.items(seed, epoch, 0)
        return loader.reader.generator.initial_seed()

    assert drawn(1, 1) == drawn(1, 1) and len({drawn(1, 0), drawn(2, 0), drawn(1, 1)}) == 3


class EntropicOrder(InPlace):
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(23).tolist())


def test_a_sampler_that_cannot_be_repeated_is_told():
    notes = lambda sampler: Process(DataLoader(Plain(), batch_size=6, sampler=sampler), 0, 1, 1).loader.notes  # noqa: E731
    assert [notes(InPlace()), notes(RandomSampler(range(23)))] == [[], []]
    (told,) = notes(EntropicOrder())
    assert told.startswith("EntropicOrder returns different samples for the same seed") and "not exact" in told


class TooLargeToCopy(Plain):
    def __deepcopy__(self, memo: dict[int, object]) -> object:
        raise MemoryError


def test_a_sampler_is_compared_without_copying_its_datasets():
    data, sampler = TooLargeToCopy(), EntropicOrder()
    sampler.data = data
    loader = DataLoader(Subset(data, range(23)), batch_size=6, sampler=sampler)
    (told,) = Process(loader, 0, 1, 1).loader.notes
    assert told.startswith("EntropicOrder returns different samples")


class Shared(Plain):
    """Divides itself among processes, like the readers of some formats."""

    def __len__(self) -> int:
        return super().__len__() // torch.distributed.get_world_size()


def test_a_dataset_that_divides_itself_is_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(
        UserError, match="Shared has 11 samples in each of 2 processes and 23 in one: it divides itself"
    ):
        Process(DataLoader(Shared(), batch_size=4), 0, 2, 1)
