"""Evaluation figures are those of all samples at once, however they come in."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.training.metrics import Evaluation

FLOAT64 = pytest.mark.skipif(torch.backends.mps.is_available(), reason="mps has no float64")


def samples(count: int, ignored: float = 0.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    label_B = random.integers(0, 10, count)
    logits_BK = random.normal(size=(count, 10)) + 2 * np.eye(10)[label_B]
    label_B[random.random(count) < ignored] = -100
    return torch.tensor(logits_BK, dtype=torch.float32), torch.tensor(label_B)


def figures(*batches: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    evaluation = Evaluation()
    for logits_BK, label_B in batches:
        evaluation.update(logits_BK, label_B)
    return {name: value.item() for name, value in evaluation.compute().items()}


def plainly(logits_BK: torch.Tensor, label_B: torch.Tensor) -> dict[str, float]:
    """The same from the formulas, a sample at a time, in double precision."""
    pairs = [(z, int(y)) for z, y in zip(logits_BK.double().numpy(), label_B, strict=True) if y >= 0]
    losses = [float(np.log(np.exp(z - z.max()).sum()) + z.max() - z[y]) for z, y in pairs]
    hits = sum(int(z.argmax() == y) for z, y in pairs)
    return {"loss": sum(losses) / len(pairs), "acc": hits / len(pairs), "count": len(pairs)}


@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_the_figures_are_those_of_a_plain_computation(ignored):
    logits_BK, label_B = samples(500, ignored)
    assert figures((logits_BK, label_B)) == pytest.approx(plainly(logits_BK, label_B), rel=1e-6)


def test_places_without_a_sample_count_nowhere():
    logits_BK, label_B = samples(100)
    fillers = (1e4 * torch.rand(37, 10), torch.full((37,), -100))
    assert figures((logits_BK, label_B), fillers) == figures((logits_BK, label_B))
    mixed = (torch.cat([logits_BK, fillers[0]]), torch.cat([label_B, fillers[1]]))
    assert figures(mixed) == pytest.approx(figures((logits_BK, label_B)), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 300), max_size=12), seed=st.integers(0, 1000))
def test_how_samples_are_split_into_batches_does_not_show(cuts, seed):
    logits_BK, label_B = samples(300, 0.1, seed)
    places = [0, *sorted(cuts), 300]
    batches = [(logits_BK[a:b], label_B[a:b]) for a, b in pairwise(places)]
    assert figures(*batches) == pytest.approx(figures((logits_BK, label_B)), rel=1e-6)


def test_the_sums_of_two_processes_make_the_figures_of_all():
    (logits_BK, label_B), one, other = samples(300), Evaluation(), Evaluation()
    one.update(logits_BK[:17], label_B[:17])
    other.update(logits_BK[17:], label_B[17:])
    one.merge_state(other)
    merged = {name: value.item() for name, value in one.compute().items()}
    assert merged == pytest.approx(figures((logits_BK, label_B)), rel=1e-6)


def test_a_reset_forgets_what_came_before():
    evaluation, last = Evaluation(), samples(50, seed=1)
    evaluation.update(*samples(50, seed=0))
    evaluation.reset()
    evaluation.update(*last)
    assert {name: value.item() for name, value in evaluation.compute().items()} == figures(last)


def of_loss(loss: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A sample whose cross-entropy is `loss`, exactly where it is large."""
    return torch.tensor([[0.0, loss]]), torch.tensor([0])


@FLOAT64
def test_small_losses_are_not_lost_beside_a_large_sum():
    evaluation = Evaluation()
    for loss in (2.0**25, *[64.0] * 10, *[1.0] * 10):
        evaluation.update(*of_loss(loss))
    small = 10 * torch.nn.functional.cross_entropy(*of_loss(1.0)).double().item()
    assert evaluation.loss_sum.item() == pytest.approx(2.0**25 + 640 + small, rel=1e-12)


@FLOAT64
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_leave_the_sums_in_float64(dtype):
    task = nn.Module()
    task.evaluation = Evaluation()
    task.to(dtype)  # as Lightning does for precision bf16-true and 16-true
    logits_BK, label_B = samples(3000)
    for i in range(0, 3000, 100):
        task.evaluation.update(logits_BK[i : i + 100].to(dtype), label_B[i : i + 100])
    assert task.evaluation.loss_sum.dtype == torch.float64
    expected = plainly(logits_BK.to(dtype).float(), label_B)
    assert task.evaluation.compute()["loss"].item() == pytest.approx(expected["loss"], rel=1e-5)
