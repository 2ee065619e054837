"""The arithmetic of batches: bijections, the same global batches in every world, each evaluation sample once."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from lockstep.data import sampler
from lockstep.data.dataset import Arrays, DataSet
from lockstep.data.sampler import FILLER, PaddedEvalSampler, Split, TrainBatches, UnpaddedEvalSampler, permute, splits
from lockstep.errors import UserError

SEEDS = st.integers(0, 2**32 - 1)
EPOCHS = st.integers(0, 10_000)
# Python 3.12 and 3.13 warn about every fork beside threads; torch has threads, and DataLoader forks its workers.
FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class ByArray(Dataset):
    def __getitem__(self, indices):
        return torch.from_numpy(indices)


class ByIndex(Dataset):
    def __getitem__(self, index):
        return torch.tensor(index)


def stacked(split, *, batch, seed, world, accumulate) -> np.ndarray:
    """The global batches of all ranks: within a step micro-batch after micro-batch, within one of these rank by rank."""
    ranks = [
        list(TrainBatches(split, batch=batch, seed=seed, rank=rank, world=world, accumulate=accumulate))
        for rank in range(world)
    ]
    steps, share = split.count // batch, batch // (world * accumulate)
    return np.array(ranks).reshape(world, steps, accumulate, share).transpose(1, 2, 0, 3).reshape(steps, batch)


def epoch_of(batches: TrainBatches, epoch: int) -> np.ndarray:
    batches.set_epoch(epoch)
    return np.array(list(batches))


# --- permutations ----------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(n=st.integers(1, 5000), seed=SEEDS, epoch=EPOCHS)
def test_a_permutation_reaches_every_place_once(n, seed, epoch):
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


def test_places_among_a_billion_samples_are_computed_one_by_one_and_no_two_share_one():
    n = 10**9
    positions = np.array([0, 1, 2, 31_622, 31_623, n // 2, n - 2, n - 1])
    places = permute(positions, n, 3, 1)
    assert [int(permute(positions[i : i + 1], n, 3, 1)[0]) for i in range(len(positions))] == places.tolist()
    assert places.min() >= 0
    assert places.max() < n
    count = 300_000  # a random function would give 45 pairs the same place
    assert len(np.unique(permute(np.arange(count) * (n // count), n, 0, 0))) == count


@pytest.mark.parametrize("vary", ["seed", pytest.param("epoch", marks=pytest.mark.slow)])
def test_all_orders_of_five_samples_are_equally_frequent(vary):
    draws, orders = 3600, 120
    pairs = [(i, 0) if vary == "seed" else (0, i) for i in range(draws)]
    seen = Counter(tuple(permute(np.arange(5), 5, seed, epoch).tolist()) for seed, epoch in pairs)
    expected = draws / orders
    chi2 = sum((count - expected) ** 2 / expected for count in seen.values()) + expected * (orders - len(seen))
    assert chi2 < 181  # 119 degrees of freedom: 4 standard deviations


@settings(max_examples=60, deadline=None)
@given(first=st.tuples(SEEDS, EPOCHS), second=st.tuples(SEEDS, EPOCHS))
@example(first=(0, 1), second=(1, 0))
@example(first=(0, 0), second=(0, 1))
def test_another_seed_or_epoch_gives_another_order(first, second):
    assume(first != second)
    assert not np.array_equal(permute(np.arange(1000), 1000, *first), permute(np.arange(1000), 1000, *second))


# --- training --------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    world=st.integers(1, 600),
    accumulate=st.integers(1, 5),
    share=st.integers(1, 4),
    steps=st.integers(0, 3),
    rest=st.integers(0, 10**6),
    seed=SEEDS,
)
@example(world=4096, accumulate=3, share=1, steps=2, rest=1, seed=0)
@example(world=3, accumulate=2, share=7, steps=2, rest=41, seed=1)
def test_the_global_batches_are_those_of_one_process(world, accumulate, share, steps, rest, seed):
    batch = world * accumulate * share
    split = Split(total=steps * batch + rest % batch + 11, first=11, count=steps * batch + rest % batch)
    alone = np.array(list(TrainBatches(split, batch=batch, seed=seed))).reshape(steps, batch)
    assert np.array_equal(stacked(split, batch=batch, seed=seed, world=world, accumulate=accumulate), alone)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 3000), batch=st.integers(1, 200), epoch=EPOCHS, seed=SEEDS)
def test_no_sample_comes_twice_in_an_epoch(count, batch, epoch, seed):
    split = Split(total=count + 100, first=50, count=count)
    seen = epoch_of(TrainBatches(split, batch=batch, seed=seed), epoch).ravel()
    assert len(seen) == count // batch * batch
    assert len(np.unique(seen)) == len(seen)
    assert set(seen.tolist()) <= set(split.indices(np.arange(count)).tolist())


@pytest.mark.parametrize(("first", "most"), [(1, 1), (1, 7), (1, 10**6), (7, 64), (100, 1000), (10**6, 10**6)])
def test_how_many_indices_are_computed_at_once_does_not_show(monkeypatch, first, most):
    split = Split(1009, 0, 1009)
    batches = TrainBatches(split, batch=12, seed=5, rank=1, world=2, accumulate=3)
    order = split.indices(permute(np.arange(1008), 1009, 5, 0)).reshape(84, 3, 2, 2)  # step, micro-batch, rank, sample
    monkeypatch.setattr(sampler, "FIRST_BLOCK", first)
    monkeypatch.setattr(sampler, "BLOCK", most)
    assert np.array_equal(list(batches), order[:, :, 1].reshape(-1, 2))
    batches.epoch, batches.start = 0, 100
    assert np.array_equal(list(batches), order[:, :, 1].reshape(-1, 2)[100:])


@pytest.mark.parametrize("steps_done", [0, 120_000, 10**9 // 4096 - 1])
def test_a_rank_among_thousands_holds_no_more_of_a_billion_samples_than_its_next(steps_done):
    batches = TrainBatches(Split(10**9, 0, 10**9), batch=4096, seed=0, rank=4095, world=4096)
    batches.epoch, batches.start = 0, steps_done
    tracemalloc.start()
    next(iter(batches))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6


def test_an_epoch_longer_than_one_block_is_the_same_in_two_processes():
    split = Split(150_001, 0, 150_001)
    alone = np.array(list(TrainBatches(split, batch=1000, seed=0)))
    assert np.array_equal(stacked(split, batch=1000, seed=0, world=2, accumulate=1), alone)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    count=st.integers(40, 700),
    world=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    epoch=EPOCHS,
)
def test_resuming_yields_exactly_the_rest_of_the_epoch(data, count, world, accumulate, epoch):
    split, rank = Split(700, 0, count), data.draw(st.integers(0, world - 1))
    batches = TrainBatches(split, batch=3 * world * accumulate, seed=9, rank=rank, world=world, accumulate=accumulate)
    whole = epoch_of(batches, epoch)
    done = data.draw(st.integers(0, len(batches)))
    batches.start = done  # which outlasts the set_epoch that the Trainer calls next
    assert np.array_equal(epoch_of(batches, epoch).reshape(-1, 3), whole[done:])
    assert np.array_equal(list(batches), whole)  # the epoch after begins at its beginning


def test_each_epoch_has_its_own_order_and_leaves_out_others():
    batches = TrainBatches(Split(1003, 0, 1003), batch=20, seed=0)
    first, second = epoch_of(batches, 0).ravel(), epoch_of(batches, 1).ravel()
    assert not np.array_equal(first, second)
    assert set(first.tolist()) != set(second.tolist())
    assert np.array_equal(epoch_of(batches, 0).ravel(), first)


def test_the_length_counts_micro_batches_of_whole_global_batches():
    batches = TrainBatches(Split(1003, 0, 1003), batch=24, seed=0, world=2, accumulate=3)
    assert len(batches) == len(list(batches)) == 41 * 3
    assert len(TrainBatches(Split(23, 0, 23), batch=24, seed=0)) == 0


@pytest.mark.parametrize(("batch", "world", "accumulate"), [(64, 3, 1), (64, 1, 3), (64, 8, 16), (1, 2, 1)])
def test_a_batch_that_cannot_be_divided_is_refused(batch, world, accumulate):
    with pytest.raises(ValueError, match=f"batch of {batch} .*{world} processes x {accumulate} micro-batches"):
        TrainBatches(Split(1000, 0, 1000), batch=batch, seed=0, world=world, accumulate=accumulate)


@FORKS
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("data", "how"), [(ByArray(), {"sampler": 0, "batch_size": None}), (ByIndex(), {"batch_sampler": 0})]
)
def test_a_dataloader_takes_it_for_data_indexed_by_arrays_or_by_numbers(data, how, num_workers):
    batches = TrainBatches(Split(101, 0, 101), batch=12, seed=1, rank=1, world=2)
    options = {key: batches if value == 0 else value for key, value in how.items()}
    loader = DataLoader(data, num_workers=num_workers, **options)
    assert len(loader) == len(batches)
    assert np.array_equal(torch.stack(list(loader)).numpy(), list(batches))


# --- evaluation ------------------------------------------------------------------------------------------------------


def assert_each_once(split: Split, batch: int, world: int) -> None:
    """All ranks' batches have one shape; laid side by side they are the split, in order, then fillers."""
    ranks = [list(PaddedEvalSampler(split, batch=batch, rank=rank, world=world)) for rank in range(world)]
    lengths = {len(PaddedEvalSampler(split, batch=batch, rank=rank, world=world)) for rank in range(world)}
    assert {len(batches) for batches in ranks} == lengths
    assert len({indices.shape for batches in ranks for indices in batches}) == 1
    laid = np.array(ranks).transpose(1, 0, 2).ravel()
    assert laid[: split.count].tolist() == split.indices(np.arange(split.count)).tolist()
    assert (laid[split.count :] == FILLER).all() and FILLER < 0


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 600), first=st.integers(0, 50), batch=st.integers(1, 700), world=st.integers(1, 700))
@example(size=1, first=0, batch=1000, world=4096)
@example(size=600, first=3, batch=700, world=4095)
@example(size=10_000, first=0, batch=64, world=3)
def test_each_validation_and_test_image_counts_once_whatever_divides(size, first, batch, world):
    assert_each_once(Split(size + 50, first, size), batch, world)
    assert_each_once(Split(size, 0, size, shuffled=False), batch, world)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_the_number_of_batches_does_not_grow_with_the_world(world):
    assert len(PaddedEvalSampler(Split(100, 0, 100), batch=100, world=world)) == 1
    assert len(PaddedEvalSampler(Split(10_000, 0, 10_000), batch=1000, world=world)) == 10


def shares(count: int, batch: int, world: int, shuffled: bool = False) -> list[list[np.ndarray]]:
    split = Split(2 * count, 1, count, shuffled)
    return [list(UnpaddedEvalSampler(split, batch=batch, rank=rank, world=world)) for rank in range(world)]


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 100), st.integers(1, 8), st.booleans())
def test_without_fillers_every_sample_comes_once_and_ranks_have_as_many_batches(count, batch, world, shuffled):
    if count < world:
        with pytest.raises(ValueError, match="cannot be shared"):
            shares(count, batch, world)
        return
    found, whole = shares(count, batch, world, shuffled), Split(2 * count, 1, count, shuffled).indices(np.arange(count))
    assert len({len(own) for own in found}) == 1
    steps = [np.concatenate(step).tolist() for step in zip(*found, strict=True)]
    assert sorted(np.concatenate(steps)) == sorted(whole)
    for step in zip(*found, strict=True):
        sizes = [len(part) for part in step]
        assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1
    # global batches are those of one process, but for a remainder that is too small
    (one,) = shares(count, max(batch, world), 1, shuffled)
    one = [part.tolist() for part in one]
    if len(one) > 1 and len(one[-1]) < world:
        one[-2:] = [one[-2] + one[-1]]
    assert [sorted(step) for step in steps] == [sorted(step) for step in one]


# --- splits ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data=st.data(), total=st.integers(2, 4000))
def test_training_and_validation_images_are_disjoint_and_together_all(data, total):
    val = data.draw(st.integers(1, total - 1))
    val_indices = Split(total, 0, val).indices(np.arange(val))
    train_indices = Split(total, val, total - val).indices(np.arange(total - val))
    assert not set(val_indices.tolist()) & set(train_indices.tolist())
    assert np.array_equal(np.sort(np.concatenate([val_indices, train_indices])), np.arange(total))


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, epoch=EPOCHS)
def test_the_images_that_are_trained_on_do_not_depend_on_the_seed(seed, epoch):
    split = Split(500, 50, 450)
    trained = epoch_of(TrainBatches(split, batch=45, seed=seed), epoch).ravel()
    assert sorted(trained.tolist()) == sorted(split.indices(np.arange(450)).tolist())


def test_the_validation_images_of_mnist_stay_the_same_in_every_version():
    # Were they others, a checkpoint of an older version would be validated on images that it was trained on.
    assert Split(60_000, 0, 6000).indices(np.arange(6)).tolist() == [2895, 20540, 33155, 10981, 22991, 14861]


def test_a_split_in_the_order_of_the_file_keeps_it():
    assert Split(10, 2, 5, shuffled=False).indices(np.arange(5)).tolist() == [2, 3, 4, 5, 6]


def data_of(total: int) -> DataSet:
    made = DataSet()
    made.train, made.val, made.test = (Arrays(input=np.zeros(n)) if n else None for n in (total, 0, 2))
    return made


@pytest.mark.parametrize(("total", "folds"), [(10, 5), (11, 3), (64, 7), (5, 5)])
def test_folds_divide_the_training_part(total, folds):
    held_out = []
    for fold in range(folds):
        train, val, _ = splits(data_of(total), batch_size=1, folds=folds, fold=fold)
        parts = [split.indices(np.arange(split.count)).tolist() for split in (train, val)]
        assert sorted(parts[0] + parts[1]) == list(range(total))
        held_out += parts[1]
    assert sorted(held_out) == list(range(total))


def test_folds_that_cannot_be_are_refused():
    with pytest.raises(UserError, match=r"data.folds=9 is more than the 8 training"):
        splits(data_of(8), batch_size=1, folds=9)
    data = data_of(8)
    data.val = Arrays(input=np.zeros(2))
    with pytest.raises(UserError, match="validation part of its own"):
        splits(data, batch_size=1, folds=2)
