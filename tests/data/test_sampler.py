"""The arithmetic of batches: bijections, the same global batches in every world, each evaluation sample once."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from in_process import state
from torch.utils.data import DataLoader, Dataset

from lockstep.data import sampler
from lockstep.data.datamodule import DataModule
from lockstep.data.dataset import Arrays, DataSet
from lockstep.data.sampler import FILLER, EvalSampler, Split, TrainBatches, balanced, permute, splits
from lockstep.errors import UserError
from lockstep.tasks import Classification

SEEDS = st.integers(0, 2**32 - 1)
EPOCHS = st.integers(0, 10_000)


class ByIndex(Dataset):
    def __getitem__(self, index):
        return torch.tensor(index)


def stacked(split, *, batch, seed, world, accumulate=1, epoch=0) -> np.ndarray:
    """The global batches of all ranks: within a step micro-batch after micro-batch, within one of these rank by rank."""
    options = {"batch": batch, "seed": seed, "world": world, "accumulate": accumulate, "epoch": epoch}
    ranks = [list(TrainBatches(split, rank=rank, **options)) for rank in range(world)]
    steps, share = split.count // batch, batch // (world * accumulate)
    return np.array(ranks).reshape(world, steps, accumulate, share).transpose(1, 2, 0, 3).reshape(steps, batch)


def epoch_of(batches: TrainBatches, epoch: int) -> np.ndarray:
    batches.set_epoch(epoch)
    return np.array(list(batches))


# --- permutations ---


@settings(max_examples=50, deadline=None)
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


# --- training ---


def test_each_seed_and_epoch_has_its_own_order_and_leaves_out_others():
    split = Split(1003, 0, 1003)
    orders = [epoch_of(TrainBatches(split, batch=24, seed=seed), epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({order.tobytes() for order in orders}) == 4
    assert len({frozenset(order.ravel().tolist()) for order in orders}) == 4
    batches = TrainBatches(split, batch=24, seed=0, accumulate=3)
    assert len(batches) == len(list(batches)) == 41 * 3  # micro-batches of whole global batches
    assert len(TrainBatches(Split(23, 0, 23), batch=24, seed=0)) == 0


@settings(max_examples=12, deadline=None)
@given(
    world=st.integers(1, 100),
    accumulate=st.integers(1, 5),
    share=st.integers(1, 4),
    steps=st.integers(0, 3),
    rest=st.integers(0, 10**6),
    seed=SEEDS,
)
@example(world=2048, accumulate=3, share=1, steps=2, rest=1, seed=0)
@example(world=3, accumulate=2, share=7, steps=2, rest=41, seed=1)
@example(world=2, accumulate=1, share=500, steps=40, rest=1, seed=0)  # longer than one block of indices
def test_the_global_batches_are_those_of_one_process_without_a_sample_twice(
    world, accumulate, share, steps, rest, seed
):
    batch = world * accumulate * share
    split = Split(total=steps * batch + rest % batch + 11, first=11, count=steps * batch + rest % batch)
    alone = np.array(list(TrainBatches(split, batch=batch, seed=seed))).reshape(steps, batch)
    assert np.array_equal(stacked(split, batch=batch, seed=seed, world=world, accumulate=accumulate), alone)
    assert len(np.unique(alone)) == steps * batch
    assert set(alone.ravel().tolist()) <= set(split.indices(np.arange(split.count)).tolist())


@pytest.mark.parametrize("steps_done", [0, 120_000, 10**9 // 4096 - 1])
def test_a_rank_among_thousands_holds_no_more_of_a_billion_samples_than_its_next(steps_done):
    batches = TrainBatches(Split(10**9, 0, 10**9), batch=4096, seed=0, rank=4095, world=4096)
    batches.epoch, batches.start = 0, steps_done
    tracemalloc.start()
    next(iter(batches))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    count=st.integers(40, 700),
    world=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    epoch=EPOCHS,
    block=st.sampled_from([1, 7, 64, 8192]),  # indices computed at once: it does not show
)
def test_resuming_yields_exactly_the_rest_of_the_epoch(data, count, world, accumulate, epoch, block):
    split, rank = Split(700, 0, count), data.draw(st.integers(0, world - 1))
    batches = TrainBatches(split, batch=3 * world * accumulate, seed=9, rank=rank, world=world, accumulate=accumulate)
    whole = epoch_of(batches, epoch)
    done = data.draw(st.integers(0, len(batches)))
    batches.start = done  # which outlasts the set_epoch that the Trainer calls next
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "BLOCK", block)
        assert np.array_equal(epoch_of(batches, epoch).reshape(-1, 3), whole[done:])
    assert np.array_equal(list(batches), whole)  # the epoch after begins at its beginning


@pytest.mark.parametrize(("batch", "world", "accumulate"), [(64, 3, 1), (64, 1, 3), (1, 2, 1)])
def test_a_batch_that_cannot_be_divided_is_rejected(batch, world, accumulate):
    with pytest.raises(ValueError, match=f"batch of {batch} .*{world} processes x {accumulate} micro-batches"):
        TrainBatches(Split(1000, 0, 1000), batch=batch, seed=0, world=world, accumulate=accumulate)


# Python 3.12 and 3.13 warn about every fork beside threads; torch has threads, and DataLoader forks its workers.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_it_is_a_batch_sampler_of_torch():
    batches = TrainBatches(Split(500, 0, 500), batch=60, seed=4, rank=1, world=2, accumulate=3)
    loader = DataLoader(ByIndex(), num_workers=2, batch_sampler=batches)
    assert len(loader) == len(batches)
    assert np.array_equal(torch.stack(list(loader)).numpy(), list(batches))


# --- evaluation ---


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 600), batch=st.integers(1, 700), world=st.integers(1, 100), shuffled=st.booleans())
@example(size=1, batch=1000, world=1024, shuffled=True)
@example(size=10_000, batch=64, world=3, shuffled=False)
def test_each_evaluation_sample_counts_once_whatever_divides(size, batch, world, shuffled):
    """All ranks' batches have one shape; laid side by side they are the split, in order, then fillers."""
    split = Split(size + 50, 3, size, shuffled)
    samplers = [EvalSampler(split, batch=batch, rank=rank, world=world) for rank in range(world)]
    ranks = [list(sampler) for sampler in samplers]
    assert {len(batches) for batches in ranks} == {len(sampler) for sampler in samplers}
    assert len(ranks[0]) == -(-size // (-(-min(batch, size) // world) * world))  # no more than one process needs
    assert len({indices.shape for batches in ranks for indices in batches}) == 1
    laid = np.array(ranks).transpose(1, 0, 2).ravel()
    assert laid[:size].tolist() == split.indices(np.arange(size)).tolist()
    assert (laid[size:] == FILLER).all() and FILLER < 0


@pytest.mark.parametrize("world", [1, 2, 4])
def test_logical_ranks_have_the_same_evaluation_batches_in_every_world(world):
    split = Split(103, 0, 103)
    alone = [list(EvalSampler(split, batch=40, rank=rank, world=8)) for rank in range(8)]
    parts = [list(EvalSampler(split, batch=40, rank=rank, world=world, shards=8)) for rank in range(world)]
    for rank, batches in enumerate(parts):
        for number, indices in enumerate(batches):
            step, part = divmod(number, 8 // world)
            assert np.array_equal(indices, alone[part * world + rank][step])


def shares(split: Split, batch: int, world: int) -> list[list[np.ndarray]]:
    return [list(EvalSampler(split, batch=batch, rank=rank, world=world, padded=False)) for rank in range(world)]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(1, 100), st.integers(1, 8), st.booleans())
def test_without_fillers_every_sample_comes_once_and_ranks_have_as_many_batches(count, batch, world, shuffled):
    split = Split(2 * count, 1, count, shuffled)
    if count < world:
        with pytest.raises(ValueError, match="cannot be shared"):
            shares(split, batch, world)
        return
    steps = [[part.tolist() for part in step] for step in zip(*shares(split, batch, world), strict=True)]
    for step in steps:
        sizes = [len(part) for part in step]
        assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1
    # global batches are those of one process, but for a remainder that is too small
    (one,) = shares(split, max(batch, world), 1)
    one = [part.tolist() for part in one]
    assert np.concatenate(one).tolist() == split.indices(np.arange(count)).tolist()
    if len(one) > 1 and len(one[-1]) < world:
        one[-2:] = [one[-2] + one[-1]]
    assert [np.concatenate(step).tolist() for step in steps] == one


# --- splits ---


def data_of(total: int = 3, **arrays: np.ndarray) -> DataSet:
    data = DataSet()
    data.train, data.val = Arrays(**(arrays or {"input": np.zeros(total)})), None
    data.test, data.about = Arrays(input=np.zeros(2)), {"classes": ["a", "b", "c"]}
    return data


def test_the_validation_images_stay_the_same_in_every_version():
    # Were they others, a checkpoint of an older version would be validated on images that it was trained on.
    assert Split(60_000, 0, 6000).indices(np.arange(6)).tolist() == [2895, 20540, 33155, 10981, 22991, 14861]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), total=st.integers(2, 2000), seed=SEEDS, epoch=EPOCHS)
def test_training_and_validation_images_are_disjoint_and_together_all_for_every_seed(data, total, seed, epoch):
    val = data.draw(st.integers(1, total - 1))
    val_indices = Split(total, 0, val).indices(np.arange(val))
    train_indices = epoch_of(TrainBatches(Split(total, val, total - val), batch=1, seed=seed), epoch).ravel()
    assert sorted([*val_indices.tolist(), *train_indices.tolist()]) == list(range(total))


@pytest.mark.parametrize(
    ("limit_train", "val_fraction", "possible", "held_out"),
    [(None, 0.1, 54, 6), (20, 0.1, 20, 6), (None, 0.5, 30, 30), (None, 0.001, 59, 1)],
)
def test_a_batch_larger_than_the_training_set_is_rejected(limit_train, val_fraction, possible, held_out):
    how = {"val_fraction": val_fraction, "limit_train": limit_train}
    with pytest.raises(UserError, match=rf"data\.batch_size=60 .*Set data\.batch_size={possible} or less"):
        splits(data_of(60), batch_size=60, **how)
    train, val, test = splits(data_of(60), batch_size=possible, **how)
    assert (train.count, val.count, test.count) == (possible, held_out, 2)
    assert not set(train.indices(np.arange(train.count))) & set(val.indices(np.arange(val.count)))


@pytest.mark.parametrize(("total", "folds"), [(10, 5), (11, 3), (5, 5)])
def test_folds_divide_the_training_part(total, folds):
    held_out = []
    for fold in range(folds):
        train, val, _ = splits(data_of(total), batch_size=1, folds=folds, fold=fold)
        parts = [split.indices(np.arange(split.count)).tolist() for split in (train, val)]
        assert sorted(parts[0] + parts[1]) == list(range(total))
        held_out += parts[1]
    assert sorted(held_out) == list(range(total))
    with pytest.raises(UserError, match=rf"data.folds={total + 1} is more than the {total} training"):
        splits(data_of(total), batch_size=1, folds=total + 1)


# --- balanced classes ---

SIZES = (60, 9, 3)


def labels(sizes=SIZES) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=6), epoch=st.integers(0, 5))
def test_an_epoch_takes_every_class_equally_often(sizes, epoch):
    class_N = labels(sizes)
    split = balanced(Split(len(class_N), 0, len(class_N)), Arrays(target=class_N), "images")
    counts = Counter(class_N[split.ordered(np.arange(split.count), 7, epoch)].tolist())
    assert max(counts.values()) - min(counts.get(number, 0) for number in range(len(sizes))) <= 1


def test_samples_of_a_class_come_in_turn_over_epochs_each_time_in_a_different_order():
    class_N = labels()
    split = balanced(Split(len(class_N), 0, len(class_N)), Arrays(target=class_N), "images")
    taken = np.concatenate([split.ordered(np.arange(split.count), 7, epoch) for epoch in range(5)])
    seen = Counter(taken.tolist())
    assert len(seen) == len(class_N)
    for number in range(len(SIZES)):
        own = [seen[index] for index in np.flatnonzero(class_N == number).tolist()]
        assert max(own) - min(own) <= 1  # 120 of each class in five epochs of 72
    rare = taken[class_N[taken] == 1][: 13 * SIZES[1]].reshape(13, SIZES[1])
    assert len({tuple(order) for order in rare.tolist()}) > 10


@pytest.mark.parametrize("world", [2, 4])
def test_every_world_takes_the_same_balanced_batches_and_none_of_the_validation(world):
    split = balanced(Split(72, 12, 60), Arrays(target=labels()), "images")
    for epoch in (0, 3):
        alone = stacked(split, batch=12, seed=7, world=1, epoch=epoch)
        assert np.array_equal(stacked(split, batch=12, seed=7, world=world, epoch=epoch), alone)
        assert not set(Split(72, 0, 12).indices(np.arange(12)).tolist()) & set(alone.ravel().tolist())


def test_weights_of_classes_are_scikit_learns():
    module = DataModule(data_of(target=labels()), batch_size=4, eval_batch_size=4, val_fraction=0.25)
    counts = module.about["class_counts"]
    assert sum(counts) == module.train_split.count == 54
    task = Classification(class_weights="balanced")
    task.bind(module.about)
    assert task.class_weights_K.tolist() == pytest.approx([54 / (3 * count) for count in counts])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [({"input": np.zeros(8)}, "classes of the training"), ({"target": np.zeros(8, np.int64)}, "all training samples have one class"),
     ({"target": np.zeros(8)}, "classes of the training")],
)  # fmt: skip
def test_data_without_several_classes_is_rejected(arrays, message):
    with pytest.raises(UserError, match=message):
        DataModule(data_of(**arrays), batch_size=4, eval_batch_size=4, balance=True)
    task = Classification(class_weights="balanced")
    with pytest.raises(UserError, match=r"class_weights=balanced.*(one array|no training sample is of class)"):
        task.bind(DataModule(data_of(**arrays), batch_size=4, eval_batch_size=4).about)


def test_a_run_with_both_options_trains(train):
    train("run=a", "data.balance=true", "task.class_weights=balanced", "trainer.max_steps=2")
    saved = state("a/checkpoints/last.ckpt")["DataModule"]["about"]["class_counts"]
    assert (len(saved), sum(saved)) == (10, 576)
