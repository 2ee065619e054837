"""The arithmetic of batches: bijections, the same global batches in every world, each evaluation sample once."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from in_process import state
from torch.utils.data import DataLoader, IterableDataset

from lockstep.data import sampler
from lockstep.data.datamodule import DataModule
from lockstep.data.dataset import Arrays, DataSet
from lockstep.data.sampler import FILLER, EvalSampler, Split, TrainBatches, permute
from lockstep.data.splits import balanced, splits
from lockstep.errors import UserError
from lockstep.kit.tasks import Classification

SEEDS = st.integers(0, 2**32 - 1)
EPOCHS = st.integers(0, 10_000)


def micro_batches(split: Split, **options: int) -> np.ndarray:
    return np.array(list(TrainBatches(split, **options)))


def stacked(split, *, batch, seed, world, accumulate=1, epoch=0) -> np.ndarray:
    """The global batches of all ranks: within a step micro-batch after micro-batch, within one of these rank by rank."""
    options = {"batch": batch, "seed": seed, "world": world, "accumulate": accumulate, "epoch": epoch}
    ranks = [micro_batches(split, rank=rank, **options) for rank in range(world)]
    steps, share = split.count // batch, batch // (world * accumulate)
    return np.array(ranks).reshape(world, steps, accumulate, share).transpose(1, 2, 0, 3).reshape(steps, batch)


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


# --- training ---


def test_each_seed_and_epoch_has_its_own_order_of_whole_batches_and_leaves_out_others():
    split = Split(1003, 0, 1003)
    orders = [micro_batches(split, batch=24, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({order.tobytes() for order in orders}) == 4
    assert len({frozenset(order.ravel().tolist()) for order in orders}) == 4
    batches = TrainBatches(split, batch=24, seed=0, accumulate=3)
    assert len(batches) == len(list(batches)) == 41 * 3  # micro-batches of whole global batches
    assert len(TrainBatches(Split(23, 0, 23), batch=24, seed=0)) == 0
    with pytest.raises(ValueError, match=r"batch of 64 .*3 processes x 1 micro-batches"):
        TrainBatches(split, batch=64, seed=0, world=3)
    torchs = DataLoader(range(1003), batch_sampler=batches)  # it is a batch sampler of torch
    assert np.array_equal(torch.stack(list(torchs)), list(batches))


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 100), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.integers(0, 10**6), SEEDS)
@example(world=512, accumulate=3, share=1, steps=2, rest=1, seed=0)
@example(world=3, accumulate=2, share=7, steps=2, rest=41, seed=1)
@example(world=2, accumulate=1, share=500, steps=40, rest=1, seed=0)  # longer than one block of indices
def test_the_global_batches_are_those_of_one_process(world, accumulate, share, steps, rest, seed):
    """Without a sample twice."""
    batch = world * accumulate * share
    split = Split(total=steps * batch + rest % batch + 11, first=11, count=steps * batch + rest % batch)
    alone = micro_batches(split, batch=batch, seed=seed).reshape(steps, batch)
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
@given(st.data(), st.integers(40, 700), st.integers(1, 4), st.integers(1, 3), EPOCHS, st.sampled_from([1, 7, 64, 8192]))
def test_resuming_yields_exactly_the_rest_of_the_epoch(data, count, world, accumulate, epoch, block):
    """Whatever the number of indices that are computed at once."""
    split, rank = Split(700, 0, count), data.draw(st.integers(0, world - 1))
    batches = TrainBatches(split, batch=3 * world * accumulate, seed=9, rank=rank, world=world, accumulate=accumulate)
    batches.set_epoch(epoch)
    whole = np.array(list(batches))
    done = data.draw(st.integers(0, len(batches)))
    batches.start = done
    batches.set_epoch(epoch)  # as the Trainer does next; the start outlasts it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "BLOCK", block)
        assert np.array_equal(np.array(list(batches)).reshape(-1, 3), whole[done:])
    assert np.array_equal(list(batches), whole)  # the epoch after begins at its beginning


# --- evaluation ---


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 600), batch=st.integers(1, 700), world=st.integers(1, 100), parts=st.integers(1, 4), shuffled=st.booleans()
)  # fmt: skip
@example(size=1, batch=1000, world=1024, parts=1, shuffled=True)
@example(size=10, batch=7, world=3, parts=1, shuffled=False)  # 3, 3, 1
@example(size=10_000, batch=64, world=3, parts=2, shuffled=False)
def test_each_evaluation_sample_counts_once_in_the_global_batch_of_one_process(size, batch, world, parts, shuffled):
    """All ranks' batches have one shape. Laid side by side, those of a global batch are its samples, in order, then fillers."""
    split = Split(size + 50, 3, size, shuffled)
    samplers = [EvalSampler(split, batch=batch, rank=r, world=world, shards=parts * world) for r in range(world)]
    ranks = [list(sampler) for sampler in samplers]
    assert {len(batches) for batches in ranks} == {len(sampler) for sampler in samplers}
    assert len({indices.shape for batches in ranks for indices in batches}) == 1
    one = list(EvalSampler(split, batch=batch))
    laid = np.array(ranks).transpose(1, 0, 2).reshape(len(one), -1)
    order = split.indices(np.arange(size))
    for number, (whole, mine) in enumerate(zip(laid, one, strict=True)):
        expected = order[number * min(batch, size) :][:batch].tolist()
        assert [index for index in mine if index != FILLER] == expected
        assert whole[: len(expected)].tolist() == expected and (whole[len(expected) :] == FILLER).all()
    assert FILLER < 0


def shares(split: Split, batch: int, world: int) -> list[list[np.ndarray]]:
    return [list(EvalSampler(split, batch=batch, rank=rank, world=world, padded=False)) for rank in range(world)]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(1, 100), st.integers(1, 8), st.booleans())
def test_without_fillers_every_sample_comes_once_and_ranks_have_as_many_batches(count, batch, world, shuffled):
    split = Split(2 * count, 1, count, shuffled)
    if count < world:
        with pytest.raises(ValueError, match="cannot be divided"):
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
    data.test, data.metadata = Arrays(input=np.zeros(2)), {"classes": ["a", "b", "c"]}
    return data


def test_the_validation_images_stay_the_same_in_every_version():
    # Were they others, a checkpoint of an older version would be validated on images that it was trained on.
    assert Split(60_000, 0, 6000).indices(np.arange(6)).tolist() == [2895, 20540, 33155, 10981, 22991, 14861]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), total=st.integers(2, 5000), seed=SEEDS, epoch=EPOCHS)
def test_training_and_validation_images_are_disjoint_and_together_all_for_every_seed(data, total, seed, epoch):
    val = data.draw(st.integers(1, total - 1))
    val_indices = Split(total, 0, val).indices(np.arange(val))
    train_indices = micro_batches(Split(total, val, total - val), batch=1, seed=seed, epoch=epoch).ravel()
    assert sorted([*val_indices.tolist(), *train_indices.tolist()]) == list(range(total))


@pytest.mark.parametrize(
    ("limit_train", "val_fraction", "possible", "held_out"),
    [(None, 0.1, 54, 6), (20, 0.5, 20, 30), (None, 0.001, 59, 1)],
)
def test_a_batch_larger_than_the_training_set_is_rejected(limit_train, val_fraction, possible, held_out):
    how = {"val_fraction": val_fraction, "limit_train": limit_train}
    with pytest.raises(UserError, match=rf"loader\.batch_size=60 .*Set loader\.batch_size={possible} or less"):
        splits(data_of(60), batch_size=60, **how)
    train, val, test = splits(data_of(60), batch_size=possible, **how)
    assert (train.count, val.count, test.count) == (possible, held_out, 2)
    assert not set(train.indices(np.arange(train.count))) & set(val.indices(np.arange(val.count)))


class Stream(IterableDataset):
    """Has no length."""

    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(("part", "held", "told"), [
    ("train", [1, 2, 3], "the train part of DataSet is a list; expected Arrays, a torch Dataset with a length, or your own"),
    ("train", Stream(), "the train part of DataSet is a Stream;"),
    ("val", (1, 2), "the val part of DataSet is a tuple;"),
    ("test", None, "the test part of DataSet is a NoneType;"),
    ("test", ..., r"DataSet has no test part. Set self.test in its __init__"),
])  # fmt: skip
def test_what_is_no_part_of_a_data_set_is_rejected(part, held, told):
    data = data_of(60)
    vars(data).pop(part) if held is ... else setattr(data, part, held)
    with pytest.raises(UserError, match=told):
        splits(data, batch_size=1)


@pytest.mark.parametrize(("total", "folds"), [(10, 5), (11, 3), (5, 5)])
def test_folds_divide_the_training_part(total, folds):
    held_out = []
    for fold in range(folds):
        train, val, _ = splits(data_of(total), batch_size=1, folds=folds, fold=fold)
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
            with pytest.raises(UserError, match=rf"loader\.val_gap={gap} leaves none of the {total} training"):
                splits(data_of(total), batch_size=1, **keys)
            return
        train, val, _ = splits(data_of(total), batch_size=1, **keys)
        parts = [split.indices(np.arange(split.count)).tolist() for split in (train, val)]
        assert (sorted(parts[0]), parts[1]) == (left, expected)
        held_out += parts[1]
        order = train.ordered(np.arange(train.count), 0, 0).tolist()
        assert sorted(order) == left
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
        train, val, _ = splits(data, batch_size=1, folds=folds, fold=fold)
        parts = [split.indices(np.arange(split.count)) for split in (train, val)]
        assert sorted(np.concatenate(parts).tolist()) == list(range(total))
        held_out.append(np.bincount(class_N[parts[1]], minlength=len(sizes)))
        few = splits(data, batch_size=1, folds=folds, fold=fold, limit_train=train.count // 2 + 1)[
            0
        ]  # of a random order
        assert set(few.indices(np.arange(few.count))) <= set(parts[0])
    assert (np.ptp(held_out, axis=0) <= 1).all()
    with pytest.raises(UserError, match=r"loader\.folds"):
        splits(data, batch_size=1, folds=total + 1)
    if sizes == [2, 50, 3]:
        assert balanced(train, data.train, "images").indices(np.arange(train.count)).tolist() == parts[0].tolist()


def test_a_run_with_folds_of_an_earlier_version_cannot_be_resumed():
    """It would validate on samples that it has trained on."""
    module = DataModule(data_of(target=labels([4, 4])), batch_size=1, eval_batch_size=1, folds=2)
    state = module.state_dict()
    module.load_state_dict(state)
    with pytest.raises(UserError, match=r"by an earlier version, in which .* folds held out other samples"):
        module.load_state_dict({key: value for key, value in state.items() if key != "folds"})


# --- balanced classes ---

SIZES = (60, 9, 3)


def labels(sizes=SIZES) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=6), seed=SEEDS)
@example(sizes=SIZES, seed=7)
def test_an_epoch_takes_every_class_equally_often_and_its_samples_in_turn(sizes, seed):
    class_N = labels(sizes)
    split = balanced(Split(len(class_N), 0, len(class_N)), Arrays(target=class_N), "images")
    epochs = [split.ordered(np.arange(split.count), seed, epoch) for epoch in range(5)]
    assert all(np.ptp(np.bincount(class_N[taken], minlength=len(sizes))) <= 1 for taken in epochs)
    taken_N = np.bincount(np.concatenate(epochs), minlength=len(class_N))
    assert all(np.ptp(taken_N[class_N == number]) <= 1 for number in range(len(sizes)))
    if sizes == SIZES:  # the samples of a class come each time in a different order
        rare = [index for taken in epochs for index in taken.tolist() if class_N[index] == 1]
        assert len({tuple(rare[first : first + 9]) for first in range(0, 117, 9)}) > 10


def test_every_world_takes_the_same_balanced_batches_and_none_of_the_validation():
    split = balanced(Split(72, 12, 60), Arrays(target=labels()), "images")
    alone = stacked(split, batch=12, seed=7, world=1, epoch=3)
    assert np.array_equal(stacked(split, batch=12, seed=7, world=4, epoch=3), alone)
    assert not np.isin(Split(72, 0, 12).indices(np.arange(12)), alone).any()


def test_weights_of_classes_are_scikit_learns():
    module = DataModule(data_of(target=labels()), batch_size=4, eval_batch_size=4, val_fraction=0.25)
    counts = module.metadata["class_counts"]
    assert sum(counts) == module.train_split.count == 54
    task = Classification(class_weights="balanced")
    task.bind(module.metadata)
    assert task.class_weights_K.tolist() == pytest.approx([54 / (3 * count) for count in counts])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [({"target": np.zeros(8, np.int64)}, "all training samples have the same class"), ({"target": np.zeros(8)}, "classes of the training")],
)  # fmt: skip
def test_data_without_several_classes_is_rejected(arrays, message):
    with pytest.raises(UserError, match=message):
        DataModule(data_of(**arrays), batch_size=4, eval_batch_size=4, balance=True)
    task = Classification(class_weights="balanced")
    with pytest.raises(UserError, match=r"class_weights=balanced.*(one array|no training samples of class)"):
        task.bind(DataModule(data_of(**arrays), batch_size=4, eval_batch_size=4).metadata)


def test_a_run_with_both_options_trains(train):
    train("run=a", "loader.balance=true", "task.class_weights=balanced", "trainer.max_steps=2")
    saved = state("a/checkpoints/last.ckpt")["DataModule"]["about"]["class_counts"]
    assert (len(saved), sum(saved)) == (10, 576)
