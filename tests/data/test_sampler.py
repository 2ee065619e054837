"""The arithmetic of orders and splits: bijections, computed place by place, and what is held out."""

import tracemalloc
from collections import Counter

import building
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from in_process import state
from torch.utils.data import DataLoader

from lockstep.data import global_batches
from lockstep.data.dataset import Arrays, DataSet
from lockstep.data.global_batches import GlobalBatches, ShareSpec
from lockstep.data.sampler import ComputedOrder, Split, permute
from lockstep.data.splits import order, splits
from lockstep.errors import UserError
from lockstep.kit.datamodule import DataModule
from lockstep.kit.tasks import Classification

SEEDS = st.integers(0, 2**32 - 1)
EPOCHS = st.integers(0, 10_000)


# --- permutations ---


def test_places_among_a_billion_samples_are_computed_one_by_one_and_no_two_share_one():
    n = 10**9
    positions = np.array([0, 1, 2, 31_622, 31_623, n // 2, n - 2, n - 1])
    places = permute(positions, n, 3, 1)
    assert [int(permute(positions[i : i + 1], n, 3, 1)[0]) for i in range(len(positions))] == places.tolist()
    assert places.min() >= 0
    assert places.max() < n
    count = 300_000  # a random function would give 45 pairs the same place
    assert len(np.unique(permute(np.arange(count) * (n // count), n, 0, 0))) == count


@pytest.mark.parametrize(
    "pair", [lambda i: (i, 0), pytest.param(lambda i: (0, i), marks=pytest.mark.slow)], ids=["seed", "epoch"]
)
def test_all_orders_of_five_samples_are_equally_frequent(pair):
    draws, orders = 3600, 120  # with 8 ROUNDS chi2 is 224, and with 1,200 draws still 174
    seen = Counter(tuple(permute(np.arange(5), 5, *pair(i)).tolist()) for i in range(draws))
    expected = draws / orders
    chi2 = sum((count - expected) ** 2 / expected for count in seen.values()) + expected * (orders - len(seen))
    assert chi2 < 181  # 119 degrees of freedom: 4 standard deviations


# --- the order of training ---


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 500), repeats=st.integers(1, 3), seed=SEEDS, epoch=EPOCHS)
def test_each_seed_and_epoch_has_an_order_of_all_samples_that_is_computed_place_by_place(count, repeats, seed, epoch):
    order = ComputedOrder(count, repeats=repeats)
    places = np.arange(len(order))
    whole = order.at(places, seed, epoch)
    assert sorted(whole.tolist()) == np.repeat(np.arange(count), repeats).tolist()
    copies = whole.reshape(count, repeats)
    assert (copies == copies[:, :1]).all()  # in a row
    some = np.random.default_rng(0).permutation(places)[:50]
    assert np.array_equal(order.at(some, seed, epoch), whole[some])
    if count > 20:
        assert not np.array_equal(order.at(places, seed, epoch + 1), whole)
        assert not np.array_equal(order.at(places, seed + 1, epoch), whole)
    order.set_epoch(epoch)
    assert list(order) == order.at(places, 0, epoch).tolist()  # as a sampler of a plain DataLoader


@pytest.mark.parametrize("done", [0, 120_000, 10**9 // 4096 - 1])
def test_a_billion_samples_are_ordered_in_little_memory(done):
    loader = DataLoader(range(10**9), batch_size=4096, sampler=ComputedOrder(10**9), drop_last=True)
    batches = GlobalBatches(loader.batch_sampler, compare=False)
    tracemalloc.start()
    share = ShareSpec(rank=4095, world=4096).shares(batches.batches(0, 0, done), done, 0, 0, 4096)
    assert len(next(batches.with_keys(share, 0, 0)).keys) == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6


@settings(max_examples=20, deadline=None)
@given(st.data(), st.integers(40, 700), st.integers(1, 30), EPOCHS, st.sampled_from([1, 7, 64, 8192]))
def test_the_rest_of_an_epoch_does_not_depend_on_what_is_computed_at_once(data, count, size, epoch, block):
    loader = DataLoader(range(count), batch_size=size, sampler=ComputedOrder(count), drop_last=True)
    batches = GlobalBatches(loader.batch_sampler, compare=False)

    def keys(begin: int) -> list[list[int]]:
        shares = ShareSpec().shares(batches.batches(9, epoch, begin), begin, 9, epoch, size)
        return [share.keys for share in batches.with_keys(shares, 9, epoch)]

    whole = keys(0)
    assert len(whole) == len(batches) == count // size
    done = data.draw(st.integers(0, len(whole)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(global_batches, "BLOCK", block)
        assert keys(done) == whole[done:]


# --- splits ---


def data_of(total: int = 3, **arrays: np.ndarray) -> DataSet:
    data = DataSet()
    data.train, data.val = Arrays(**(arrays or {"input": np.zeros(total)})), None
    data.test, data.metadata = Arrays(input=np.zeros(2)), {"classes": ["a", "b", "c"]}
    return data


def three(data: DataSet, **options: int) -> tuple[Split, Split, Split]:
    return tuple(splits(data, **options).values())


def test_the_validation_images_stay_the_same_in_every_version():
    # Were they others, a checkpoint of an older version would be validated on images that it was trained on.
    assert Split(60_000, 0, 6000).indices(np.arange(6)).tolist() == [2895, 20540, 33155, 10981, 22991, 14861]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), total=st.integers(2, 5000), seed=SEEDS, epoch=EPOCHS)
def test_training_and_validation_images_are_disjoint_and_together_all_for_every_seed(data, total, seed, epoch):
    val = data.draw(st.integers(1, total - 1))
    val_indices = Split(total, 0, val).indices(np.arange(val))
    train = Split(total, val, total - val)
    train_indices = train.indices(ComputedOrder(train.count).at(np.arange(train.count), seed, epoch))
    assert sorted([*val_indices.tolist(), *train_indices.tolist()]) == list(range(total))


@pytest.mark.parametrize(
    ("limit_train", "val_fraction", "possible", "held_out"),
    [(None, 0.1, 54, 6), (20, 0.5, 20, 30), (None, 0.001, 59, 1)],
)
def test_a_batch_larger_than_the_training_set_is_rejected(limit_train, val_fraction, possible, held_out):
    how = {"val_fraction": val_fraction, "limit_train": limit_train}
    with pytest.raises(UserError, match=rf"loader\.batch_size=60 .*Set loader\.batch_size={possible} or less"):
        splits(data_of(60), batch_size=60, **how)
    train, val, test = three(data_of(60), batch_size=possible, **how)
    assert (train.count, val.count, test.count) == (possible, held_out, 2)
    assert not set(train.indices(np.arange(train.count))) & set(val.indices(np.arange(val.count)))


@pytest.mark.parametrize(("part", "held", "told"), [
    ("test", None, "the test part of the data has no samples"),
    ("test", ..., r"DataSet has no test part. Set self.test in its __init__"),
])  # fmt: skip
def test_a_part_that_is_missing_is_rejected(part, held, told):
    data = data_of(60)
    vars(data).pop(part) if held is ... else setattr(data, part, held)
    with pytest.raises(UserError, match=told):
        splits(data, batch_size=1)


@pytest.mark.parametrize(("total", "folds"), [(10, 5), (11, 3), (5, 5)])
def test_folds_divide_the_training_part(total, folds):
    held_out = []
    for fold in range(folds):
        train, val, _ = three(data_of(total), batch_size=1, folds=folds, fold=fold)
        parts = [split.indices(np.arange(split.count)).tolist() for split in (train, val)]
        assert sorted(parts[0] + parts[1]) == list(range(total))
        held_out += parts[1]
    assert sorted(held_out) == list(range(total))
    with pytest.raises(UserError, match=rf"loader.folds={total + 1} is more than the {total} training"):
        splits(data_of(total), batch_size=1, folds=total + 1)


@settings(max_examples=60, deadline=None)
@given(total=st.integers(4, 60), folds=st.none() | st.integers(2, 4), gap=st.integers(0, 20))
def test_neighbours_are_held_out_and_as_many_as_the_gap_left_out_on_each_side(total, folds, gap):
    held_out = []
    for fold in range(folds or 1):
        keys = {"val_gap": gap, "val_fraction": 0.25} | ({"folds": folds, "fold": fold} if folds else {})
        far = lambda place, val: place < val[0] - gap or place > val[-1] + gap  # noqa: E731
        expected = (
            [*range(total * fold // folds, total * (fold + 1) // folds)]
            if folds
            else [*range(total - round(total / 4), total)]
        )
        if not (left := [place for place in range(total) if far(place, expected)]):
            with pytest.raises(UserError, match=rf"loader\.val_gap={gap} leave none of the {total} training"):
                splits(data_of(total), batch_size=1, **keys)
            return
        train, val, _ = three(data_of(total), batch_size=1, **keys)
        parts = [split.indices(np.arange(split.count)).tolist() for split in (train, val)]
        assert (sorted(parts[0]), parts[1]) == (left, expected)
        held_out += parts[1]
    assert not folds or held_out == [*range(total)]


def test_a_gap_beside_a_validation_part_of_the_data_is_refused():
    data = data_of(60)
    data.val = data.train
    with pytest.raises(UserError, match=r"loader\.val_gap has no effect: this data has its own validation part"):
        splits(data, batch_size=1, val_gap=3)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), folds=st.integers(2, 5))
@example(sizes=[2, 50, 3], folds=3)
def test_folds_have_their_share_of_every_class(sizes, folds):
    class_N, total = labels(sizes), sum(sizes)
    assume(total >= folds + 1)
    data, held_out = data_of(target=class_N), []
    for fold in range(folds):
        train, val, _ = three(data, batch_size=1, folds=folds, fold=fold)
        parts = [split.indices(np.arange(split.count)) for split in (train, val)]
        assert sorted(np.concatenate(parts).tolist()) == list(range(total))
        held_out.append(np.bincount(class_N[parts[1]], minlength=len(sizes)))
        few, _, _ = three(
            data, batch_size=1, folds=folds, fold=fold, limit_train=train.count // 2 + 1
        )  # of a random order
        assert set(few.indices(np.arange(few.count))) <= set(parts[0])
    assert (np.ptp(held_out, axis=0) <= 1).all()
    with pytest.raises(UserError, match=r"loader\.folds"):
        splits(data, batch_size=1, folds=total + 1)
    if sizes == [2, 50, 3]:
        balanced = order(train, data.train, "images", balance=True)
        assert sorted(np.concatenate(balanced.members).tolist()) == [*range(train.count)]


# --- balanced classes ---

SIZES = (60, 9, 3)


def labels(sizes=SIZES) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=6), seed=SEEDS)
@example(sizes=SIZES, seed=7)
def test_an_epoch_takes_every_class_equally_often_and_its_samples_in_turn(sizes, seed):
    class_N = labels(sizes)
    split = Split(len(class_N), 0, len(class_N))
    balanced = order(split, Arrays(target=class_N), "images", balance=True)
    epochs = [split.indices(balanced.at(np.arange(split.count), seed, epoch)) for epoch in range(5)]
    assert all(np.ptp(np.bincount(class_N[taken], minlength=len(sizes))) <= 1 for taken in epochs)
    taken_N = np.bincount(np.concatenate(epochs), minlength=len(class_N))
    assert all(np.ptp(taken_N[class_N == number]) <= 1 for number in range(len(sizes)))
    if sizes == SIZES:  # the samples of a class come each time in a different order
        rare = [index for taken in epochs for index in taken.tolist() if class_N[index] == 1]
        assert len({tuple(rare[first : first + 9]) for first in range(0, 117, 9)}) > 10


def test_weights_of_classes_are_scikit_learns():
    module = DataModule(data_of(target=labels()), batch_size=4, eval_batch_size=4, val_fraction=0.25)
    counts = module.metadata["class_counts"]
    assert sum(counts) == module.splits["train"].count == 54
    task = building.task(Classification, keys={"class_weights": "balanced"}, **module.metadata)
    assert task.class_weights_K.tolist() == pytest.approx([54 / (3 * count) for count in counts])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [({"target": np.zeros(8, np.int64)}, "all training samples have the same class"), ({"target": np.zeros(8)}, "classes of the training")],
)  # fmt: skip
def test_data_without_several_classes_is_rejected(arrays, message):
    with pytest.raises(UserError, match=message):
        DataModule(data_of(**arrays), batch_size=4, eval_batch_size=4, balance=True)
    metadata = DataModule(data_of(**arrays), batch_size=4, eval_batch_size=4).metadata
    with pytest.raises(UserError, match=r"class_weights=balanced.*(one array|a class has no training samples)"):
        building.task(Classification, keys={"class_weights": "balanced"}, **metadata)


def test_a_run_with_both_options_trains(train):
    train("run=a", "loader.balance=true", "task.class_weights=balanced", "trainer.max_steps=2")
    saved = state("a/checkpoints/last.ckpt")["DataModule"]["about"]["class_counts"]
    assert (len(saved), sum(saved)) == (10, 576)
