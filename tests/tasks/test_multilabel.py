"""Losses and figures of multilabel classification against the formulas in NumPy."""

import numpy as np
import pytest
import torch
from evaluated import evaluated

from lockstep.errors import UserError
from lockstep.tasks import Multilabel

LABELS = ["rain", "wind", "snow"]


def samples(count: int = 50, scale: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(count, 3)) * scale, random.integers(0, 2, (count, 3))


def task(**arguments) -> Multilabel:
    made = Multilabel(**arguments)
    made.bind({"labels": LABELS})
    return made


@pytest.mark.parametrize("pos_weight", [None, [1.0, 5.0, 0.5]])
def test_the_loss_is_the_mean_over_labels(pos_weight):
    logits_BL, target_BL = samples()
    probability_BL = 1 / (1 + np.exp(-logits_BL))
    factor_L = np.array(pos_weight or [1, 1, 1])
    expected = -(factor_L * target_BL * np.log(probability_BL) + (1 - target_BL) * np.log(1 - probability_BL)).mean(1)
    found = task(pos_weight=pos_weight).loss(torch.tensor(logits_BL), {"target": torch.tensor(target_BL)})
    assert found.numpy() == pytest.approx(expected)


@pytest.mark.parametrize("threshold", [0.5, 0.2])
def test_the_figures_count_labels_above_the_threshold(threshold):
    logits_BL, target_BL = samples()
    present_BL, target_BL = 1 / (1 + np.exp(-logits_BL)) > threshold, target_BL.astype(np.uint8)
    f1_L = 2 * (present_BL & target_BL).sum(0) / (present_BL.sum(0) + target_BL.sum(0))
    found = evaluated(task(threshold=threshold), logits_BL.astype(np.float32), target_BL, batch=7)
    assert (found["f1"], found["acc"]) == pytest.approx((f1_L.mean(), (present_BL == target_BL).mean()))


def test_small_logits_are_not_taken_for_probabilities():
    logits_BL, target_BL = np.full((4, 3), 0.1), np.ones((4, 3), dtype=int)
    found = evaluated(task(), logits_BL, target_BL, batch=7)
    assert (found["f1"], found["acc"]) == (1.0, 1.0)


def test_a_prediction_names_the_labels_that_are_present():
    logits_BL = torch.tensor([[4.0, -4.0, 4.0], [-4.0, -4.0, -4.0]])
    found = task().predictions(logits_BL)
    assert found["labels"] == [["rain", "snow"], []]
    assert found["probabilities"].shape == (2, 3)


def test_each_label_needs_its_own_weight():
    with pytest.raises(UserError, match=r"task.pos_weight has 2 numbers; the data has 3 labels"):
        task(pos_weight=[1.0, 2.0])
    with pytest.raises(UserError, match=r"task.threshold=1.5"):
        task(threshold=1.5)
