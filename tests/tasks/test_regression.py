"""Losses and figures of regression against the formulas in NumPy."""

import numpy as np
import pytest
import torch
from evaluated import evaluated

from lockstep.tasks import Regression
from lockstep.tasks.regression import R2

TARGETS = ["height", "weight"]


def samples(offset: float = 0.0, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    target_BT = offset + scale * random.normal(size=(50, 2)) * np.array([1, 10])
    return target_BT + scale * random.normal(size=(50, 2)), target_BT


def task(targets: list[str] = TARGETS, **arguments) -> Regression:
    made = Regression(**arguments)
    made.bind({"targets": targets})
    return made


def plainly(output_BT: np.ndarray, target_BT: np.ndarray) -> dict[str, float]:
    error_BT = output_BT - target_BT
    r2_T = 1 - (error_BT**2).sum(0) / ((target_BT - target_BT.mean(0)) ** 2).sum(0)
    mse = (error_BT**2).mean()
    return {"loss": mse, "rmse": np.sqrt(mse), "mae": np.abs(error_BT).mean(), "r2": r2_T.mean()}


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("mse", lambda e: e**2),
        ("mae", np.abs),
        ("huber", lambda e: np.where(np.abs(e) < 0.5, e**2 / 2, 0.5 * (np.abs(e) - 0.25))),
    ],
)
def test_the_loss_is_the_mean_over_targets(loss, expected):
    output_BT, target_BT = samples()
    found = task(loss=loss, huber_delta=0.5).loss(torch.tensor(output_BT), {"target": torch.tensor(target_BT)})
    assert found.numpy() == pytest.approx(expected(output_BT - target_BT).mean(1))


@pytest.mark.parametrize(("offset", "scale"), [(0, 1), (1e4, 1), (0, 1e-4)])
def test_the_figures_are_those_of_all_samples(offset, scale):
    output_BT, target_BT = samples(offset, scale)
    assert evaluated(task(), output_BT, target_BT, batch=7) == pytest.approx(plainly(output_BT, target_BT), rel=1e-6)


def test_one_target_may_have_no_dimension_of_its_own():
    output_BT, target_BT = (x[:, :1] for x in samples())
    batch = {"target": torch.tensor(target_BT[:, 0])}
    found = task(["height"]).loss(torch.tensor(output_BT), batch)
    assert found.numpy() == pytest.approx((output_BT - target_BT)[:, 0] ** 2)
    flat = evaluated(task(["height"]), output_BT, target_BT[:, 0], batch=7)
    assert flat == pytest.approx(plainly(output_BT, target_BT), rel=1e-6)


def test_whole_numbers_are_compared_in_single_precision():
    output, target = torch.tensor([[1000.0], [1.0]], dtype=torch.bfloat16), torch.tensor([1001, 3])
    assert task(["height"]).loss(output, {"target": target}).tolist() == [1.0, 4.0]


def test_r2_of_two_processes_of_which_one_has_no_samples():
    (output_BT, target_BT), one, other = samples(), R2(2).to(torch.float64), R2(2).to(torch.float64)
    one.update(torch.tensor(output_BT), torch.tensor(target_BT))
    one.merge_state(other)
    assert float(one.compute()) == pytest.approx(plainly(output_BT, target_BT)["r2"])


@pytest.mark.parametrize(("output", "expected"), [([2.0, 2.0], 1.0), ([2.0, 2.5], 0.0)])
def test_r2_of_a_target_that_is_constant(output, expected):
    metric = R2(1)
    metric.update(torch.tensor(output), torch.tensor([2.0, 2.0]))
    assert float(metric.compute()) == expected


def test_a_prediction_has_a_column_for_each_target():
    found = task().predictions(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert {name: column.tolist() for name, column in found.items()} == {"height": [1.0, 3.0], "weight": [2.0, 4.0]}
