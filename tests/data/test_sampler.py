"""The arithmetic of orders and splits: bijections, computed place by place, and what is held out."""

import tracemalloc
from collections import Counter
from itertools import islice, pairwise
from typing import Any

import building
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from in_process import state
from torch.utils.data import DataLoader

from lockstep.data.dataset import Arrays, DataSet
from lockstep.data.global_batches import GlobalBatches, ShareSpec
from lockstep.data.sampler import BLOCK, ComputedOrder, Split, permute
from lockstep.data.splits import order, splits
from lockstep.errors import UserError
from lockstep.kit.datamodule import DataModule
from lockstep.kit.tasks import Classification

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=5)  # of classes


@pytest.mark.parametrize("varied", ["seed", pytest.param("epoch", marks=pytest.mark.slow)])
def test_all_orders_of_five_samples_are_equally_frequent(varied):
    draws, orders, expected = 3600, 120, 30  # with 8 ROUNDS chi2 is 224, and with 1,200 draws still 174
    keys = [{"seed": 0, "epoch": 0, varied: number} for number in range(draws)]
    seen = Counter(tuple(permute(np.arange(5), 5, **key).tolist()) for key in keys)
    chi2 = sum((count - expected) ** 2 / expected for count in seen.values()) + expected * (orders - len(seen))
    assert chi2 < 181  # 119 degrees of freedom: 4 standard deviations


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 500), repeats=st.integers(1, 3), seed=SEEDS, epoch=st.integers(0, 10_000))
def test_each_seed_and_epoch_has_its_own_order_of_all_samples(count, repeats, seed, epoch):
    order = ComputedOrder(count, repeats=repeats)
    places = np.arange(len(order))
    whole = order.at(places, seed, epoch)
    assert sorted(whole[::repeats].tolist()) == [*range(count)]
    assert np.array_equal(whole, np.repeat(whole[::repeats], repeats))  # copies in a row
    some = np.random.default_rng(0).permutation(places)[:50]
    assert np.array_equal(order.at(some, seed, epoch), whole[some])
    if count > 20:
        assert not np.array_equal(order.at(places, seed, epoch + 1), whole)
        assert not np.array_equal(order.at(places, seed + 1, epoch), whole)
    order.set_epoch(epoch)
    assert list(order) == order.at(places, 0, epoch).tolist()  # as a sampler of a plain DataLoader


def test_a_billion_samples_are_ordered_in_little_memory():
    order, size, done = ComputedOrder(10**9), 4096, 120_000
    loader = DataLoader(range(10**9), size, sampler=order, drop_last=True)
    batches = GlobalBatches(loader.batch_sampler, compare=False)
    assert len(batches) == 10**9 // size
    tracemalloc.start()
    shares = ShareSpec(rank=4095, world=4096).shares(batches.batches(3, 1, done), done, 3, 1, size)
    keys = [key for share in islice(batches.with_keys(shares, 3, 1), 2 * BLOCK) for key in share.keys]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    places = np.arange(done, done + 2 * BLOCK) * size + 4095
    assert keys == order.at(places, 3, 1).tolist()
    assert peak < 10**7
    spread = order.at(np.arange(300_000) * 3333, 3, 1)  # a random function would give 45 pairs the same place
    assert len(np.unique(spread)) == 300_000 and spread.min() >= 0 and spread.max() < 10**9


def test_the_validation_images_stay_the_same_in_every_version():
    # Otherwise a checkpoint of an older version would be validated on images that it was trained on.
    assert Split(60_000, 0, 6000).indices(np.arange(6)).tolist() == [2895, 20540, 33155, 10981, 22991, 14861]


def data_of(train: Any, val: Any = None, test: Any = range(2)) -> DataSet:
    data = DataSet()
    data.train, data.val, data.test, data.metadata = train, val, test, {"classes": ["a", "b", "c"]}
    return data


def labels(sizes: list[int]) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))


def split_indices(data: DataSet, **options: Any) -> tuple[list[int], list[int]]:
    """The indices of the training and of the validation samples."""
    train, val, _ = splits(data, batch_size=1, **options).values()
    return train.indices(np.arange(train.count)).tolist(), val.indices(np.arange(val.count)).tolist()


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, folds=st.none() | st.integers(2, 5), val_fraction=st.floats(0.001, 0.6), limit=st.integers(1, 300))
def test_train_and_val_are_disjoint_and_complete(sizes, folds, val_fraction, limit):
    class_N, held_out = labels(sizes), []
    total, val_count = len(class_N), max(1, round(len(class_N) * val_fraction))
    assume(total > max(folds or 0, val_count))
    data = data_of(Arrays(target=class_N) if len(sizes) > 1 else range(total))
    for fold in range(folds or 1):
        options = {"val_fraction": val_fraction, "folds": folds, "fold": fold}
        train, val = split_indices(data, **options)
        assert sorted(train + val) == [*range(total)]
        assert split_indices(data, limit_train=min(limit, len(train)), **options) == (train[:limit], val)
        held_out.append(np.bincount(class_N[val], minlength=len(sizes)))
    if folds:
        assert np.sum(held_out, axis=0).tolist() == sizes
        assert (np.ptp(held_out, axis=0) <= 1).all()  # a fold has its fraction of every class
    else:
        assert len(val) == val_count


@settings(max_examples=60, deadline=None)
@given(total=st.integers(4, 60), folds=st.none() | st.integers(2, 4), gap=st.integers(0, 20))
def test_with_a_gap_neighbours_are_held_out(total, folds, gap):
    starts = [total * fold // folds for fold in range(folds)] if folds else [total - round(total / 4)]
    for fold, (begin, end) in enumerate(pairwise([*starts, total])):
        options = {"val_gap": gap, "val_fraction": 0.25, "folds": folds, "fold": fold}
        expected = [*range(begin - gap), *range(end + gap, total)]
        if expected:
            train, val = split_indices(data_of(range(total)), **options)
            assert (sorted(train), val) == (expected, [*range(begin, end)])
        else:
            with pytest.raises(UserError, match=rf"loader\.val_gap={gap} leave none of the {total} training"):
                split_indices(data_of(range(total)), **options)


@pytest.mark.parametrize(("data", "options", "message"), [
    (data_of(range(60)), {"batch_size": 60}, r"loader\.batch_size=60 .*Set loader\.batch_size=54 or less"),
    (data_of(range(60)), {"batch_size": 60, "limit_train": 20}, r"Set loader\.batch_size=20 or less"),
    (data_of(range(60)), {"limit_train": 55}, r"loader\.limit_train=55 is more than the 54 training"),
    (data_of(range(60)), {"folds": 61}, r"loader\.folds=61 is more than the 60 training"),
    (data_of(range(60), val=range(6)), {"val_gap": 3}, r"loader\.val_gap has no effect: this data has its own validation part"),
    (data_of(range(60), test=None), {}, "the test part of the data has no samples"),
    (DataSet(), {}, r"DataSet has no train part. Set self.train in its __init__"),
])  # fmt: skip
def test_impossible_splits_are_rejected(data, options, message):
    with pytest.raises(UserError, match=message):
        splits(data, **{"batch_size": 1, **options})


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(3, 30), min_size=2, max_size=6), seed=SEEDS)
def test_classes_are_drawn_equally_often_and_samples_in_turn(sizes, seed):
    class_N = labels(sizes)
    data = data_of(Arrays(target=class_N))
    split = splits(data, batch_size=1, folds=5)["train"]  # with samples of every class
    balanced = order(split, data.train, "images", balance=True)
    epochs = [split.indices(balanced.at(np.arange(split.count), seed, epoch)) for epoch in range(5)]
    for index_N in epochs:
        assert np.ptp(np.bincount(class_N[index_N], minlength=len(sizes))) <= 1
    taken_N = np.bincount(np.concatenate(epochs), minlength=len(class_N))
    split_N = split.indices(np.arange(split.count))
    for number in range(len(sizes)):
        assert np.ptp(taken_N[split_N[class_N[split_N] == number]]) <= 1


@pytest.mark.parametrize(("dtype", "message"), [(int, "have the same class"), (float, "needs the classes")])
def test_data_without_several_classes_is_rejected(dtype, message):
    data = data_of(Arrays(target=np.zeros(8, dtype)))
    with pytest.raises(UserError, match=rf"loader\.balance=true .*{message}"):
        DataModule(data, batch_size=4, eval_batch_size=4, balance=True)
    metadata = DataModule(data, batch_size=4, eval_batch_size=4).metadata
    with pytest.raises(UserError, match=r"class_weights=balanced.*one array, and a sample of each class"):
        building.task(Classification, keys={"class_weights": "balanced"}, **metadata)


def test_weights_of_classes_are_scikit_learns(train):
    train("run=a", "loader.balance=true", "task.class_weights=balanced", "trainer.max_steps=2")
    metadata = state("a/checkpoints/last.ckpt")["DataModule"]["about"]
    counts = metadata["class_counts"]
    assert (len(counts), sum(counts)) == (10, 576)  # of the training split
    task = building.task(Classification, keys={"class_weights": "balanced"}, **metadata)
    assert task.class_weights_K.tolist() == pytest.approx([576 / (10 * count) for count in counts])
