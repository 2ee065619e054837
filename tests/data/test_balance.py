"""Balanced sampling takes classes equally often, samples of a class in turn, and is the same for every world."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import state

from lockstep.data.datamodule import DataModule
from lockstep.data.dataset import Arrays, DataSet
from lockstep.data.sampler import Split, TrainBatches, balanced
from lockstep.errors import UserError
from lockstep.tasks import Classification

SIZES = (60, 9, 3)


def labels(sizes=SIZES) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))


def batches(split: Split, world: int = 1, epoch: int = 0, batch: int = 12) -> list[list[int]]:
    """The global batches, put together from those of all ranks."""
    ranks = [TrainBatches(split, batch=batch, seed=7, rank=rank, world=world) for rank in range(world)]
    for rank in ranks:
        rank.set_epoch(epoch)
    return [np.concatenate(parts).tolist() for parts in zip(*ranks, strict=True)]


@settings(max_examples=30, deadline=None, database=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=6), epoch=st.integers(0, 5))
def test_an_epoch_takes_every_class_equally_often(sizes, epoch):
    class_N = labels(sizes)
    split = balanced(Split(len(class_N), 0, len(class_N)), Arrays(target=class_N), "images")
    taken = split.ordered(np.arange(split.count), 7, epoch)
    counts = Counter(class_N[taken].tolist())
    assert max(counts.values()) - min(counts.get(number, 0) for number in range(len(sizes))) <= 1


def test_samples_of_a_class_come_in_turn_over_epochs_each_time_in_another_order():
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
def test_every_world_takes_the_same_batches_and_none_of_the_validation(world):
    class_N = labels()
    split = balanced(Split(72, 12, 60), Arrays(target=class_N), "images")
    for epoch in (0, 3):
        assert batches(split, world, epoch) == batches(split, 1, epoch)
    held_out = set(Split(72, 0, 12).indices(np.arange(12)).tolist())
    assert not held_out & set(np.concatenate(batches(split)).tolist())


def data_of(**arrays: np.ndarray) -> DataSet:
    made = DataSet()
    made.train, made.val, made.test = Arrays(**arrays), None, Arrays(target=np.zeros(2, np.int64))
    made.about = {"classes": ["a", "b", "c"]}
    return made


def test_weights_of_classes_are_scikit_learns():
    module = DataModule(data_of(target=labels()), batch_size=4, eval_batch_size=4, val_fraction=0.25)
    counts = module.about["class_counts"]
    assert sum(counts) == module.train_split.count == 54
    task = Classification(class_weights="balanced")
    task.bind(module.about)
    assert task.class_weights_K.tolist() == pytest.approx([54 / (3 * count) for count in counts])


@pytest.mark.parametrize(
    ("arrays", "told"),
    [({"input": np.zeros(8)}, "classes of the training"), ({"target": np.zeros(8, np.int64)}, "all training samples have one class"),
     ({"target": np.zeros(8)}, "classes of the training")],
)  # fmt: skip
def test_data_without_several_classes_is_refused(arrays, told):
    with pytest.raises(UserError, match=told):
        DataModule(data_of(**arrays), batch_size=4, eval_batch_size=4, balance=True)
    task = Classification(class_weights="balanced")
    with pytest.raises(UserError, match=r"class_weights=balanced.*(one array|no training sample is of class)"):
        task.bind(DataModule(data_of(**arrays), batch_size=4, eval_batch_size=4).about)


def test_a_run_with_both_options_trains(train):
    train("run=a", "data.balance=true", "task.class_weights=balanced", "trainer.max_steps=2")
    saved = state("a/checkpoints/last.ckpt")["DataModule"]["about"]["class_counts"]
    assert (len(saved), sum(saved)) == (10, 576)
