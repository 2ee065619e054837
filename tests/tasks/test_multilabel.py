"""Losses and figures of multilabel classification against the formulas in NumPy."""

import numpy as np
import pytest
import torch

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


def figures(task: Multilabel, logits_BL: np.ndarray, target_BL: np.ndarray, batch: int = 7) -> dict[str, float]:
    """In batches of `batch` and a rest."""
    metrics = task.metrics()
    for i in range(0, len(target_BL), batch):
        part = {"target": torch.tensor(target_BL[i : i + batch], dtype=torch.uint8)}
        for metric in metrics.values():
            metric.update(*task.metric_inputs(torch.tensor(logits_BL[i : i + batch], dtype=torch.float32), part))
    return {name: float(metric.compute()) for name, metric in metrics.items()}


def plainly(present_BL: np.ndarray, target_BL: np.ndarray) -> dict[str, float]:
    f1 = []
    for present_B, target_B in zip(present_BL.T, target_BL.T == 1, strict=True):
        both, either = (present_B & target_B).sum(), present_B.sum() + target_B.sum()
        f1.append(2 * both / either)
    return {"f1": np.mean(f1), "acc": (present_BL == target_BL).mean()}


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
    expected = plainly(1 / (1 + np.exp(-logits_BL)) > threshold, target_BL)
    assert figures(task(threshold=threshold), logits_BL, target_BL) == pytest.approx(expected)


def test_small_logits_are_not_taken_for_probabilities():
    logits_BL, target_BL = np.full((4, 3), 0.1), np.ones((4, 3), dtype=int)
    assert figures(task(), logits_BL, target_BL) == {"f1": 1.0, "acc": 1.0}


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
