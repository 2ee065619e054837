"""Losses and figures of segmentation against the formulas in NumPy, pixel by pixel."""

import numpy as np
import pytest
import torch
from evaluated import evaluated

from lockstep.errors import UserError
from lockstep.tasks import Segmentation

CLASSES = ["ground", "water", "cloud"]
IGNORED = 255


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Images of which some have no pixel that counts, and a class that is rare."""
    random = np.random.default_rng(0)
    target_BHW = random.choice([0, 1, 2, IGNORED], size=(12, 5, 4), p=[0.5, 0.28, 0.02, 0.2]).astype(np.uint8)
    target_BHW[3] = IGNORED
    target_BHW[5, 1:] = IGNORED
    return random.normal(size=(12, 3, 5, 4)) * 2, target_BHW


def task(**arguments) -> Segmentation:
    made = Segmentation(**arguments)
    made.bind({"classes": CLASSES, "image_size": 8})
    return made


def softmax(logits_BKHW: np.ndarray) -> np.ndarray:
    power = np.exp(logits_BKHW)
    return power / power.sum(1, keepdims=True)


def pixels(logits_BKHW: np.ndarray, target_BHW: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cross-entropy, predicted and true class of each pixel that counts."""
    counts = target_BHW != IGNORED
    probability_NK = softmax(logits_BKHW).transpose(0, 2, 3, 1)[counts]
    true_N = target_BHW[counts].astype(int)
    return -np.log(probability_NK[np.arange(len(true_N)), true_N]), probability_NK.argmax(1), true_N


def test_an_image_without_a_pixel_that_counts_has_no_loss_and_no_gradient():
    logits_BKHW, target_BHW = samples()
    logits = torch.tensor(logits_BKHW[3:4], requires_grad=True)
    batch = {"target": torch.tensor(target_BHW[3:4])}
    loss_B = task().loss(logits, batch)
    loss_B.sum().backward()
    assert (loss_B.tolist(), task().weight(batch).tolist(), logits.grad.abs().sum().item()) == ([0.0], [0.0], 0.0)


@pytest.mark.parametrize("batch", [1, 5, 12])
def test_every_pixel_that_counts_weighs_the_same_in_loss_and_figures(batch):
    logits_BKHW, target_BHW = samples()
    loss_N, found_N, true_N = pixels(logits_BKHW, target_BHW)
    iou = [((found_N == k) & (true_N == k)).sum() / ((found_N == k) | (true_N == k)).sum() for k in range(3)]
    expected = {"loss": loss_N.mean(), "iou": np.mean(iou), "acc": (found_N == true_N).mean()}
    assert evaluated(task(), logits_BKHW, target_BHW, batch) == pytest.approx(expected)


def test_the_dice_loss_is_that_of_the_formula():
    logits_BKHW, target_BHW = samples()
    expected = []
    for probability_KHW, target_HW in zip(softmax(logits_BKHW), target_BHW, strict=True):
        counts = target_HW != IGNORED
        dice = []
        for k in range(3):
            p_N, t_N = probability_KHW[k][counts], target_HW[counts] == k
            dice.append((2 * (p_N * t_N).sum() + 1) / (p_N.sum() + t_N.sum() + 1))
        expected.append(1 - np.mean(dice))
    batch, logits = {"target": torch.tensor(target_BHW)}, torch.tensor(logits_BKHW)
    added = (task(dice=0.5).loss(logits, batch) - task().loss(logits, batch)).numpy()
    assert added == pytest.approx(0.5 * np.array(expected))


def test_the_loss_can_be_counted_on_the_meta_device():
    batch = {"target": torch.zeros(2, 5, 4, dtype=torch.uint8, device="meta")}
    assert task(dice=1.0).loss(torch.zeros(2, 3, 5, 4, device="meta"), batch).shape == (2,)


def test_targets_without_pixels_are_refused():
    with pytest.raises(UserError, match=r"targets of shape \(2,\), the network gives \(2, 3\)"):
        Segmentation().loss(torch.zeros(2, 3), {"target": torch.zeros(2)})
