"""Losses, metrics and predictions of the shipped tasks against the formulas in NumPy."""

import math
from collections.abc import Callable

import building
import numpy as np
import pytest
import torch
from torchmetrics import MeanMetric, Metric
from torchmetrics.detection import MeanAveragePrecision

from lockstep.errors import UserError
from lockstep.kit.task import Task
from lockstep.kit.tasks import Classification, LanguageModel, Multilabel, Regression, Segmentation
from lockstep.kit.tasks.regression import R2
from lockstep.reporting.report import headline

PADDING, IGNORED = -100, 255
Case = tuple[Task, np.ndarray, np.ndarray, dict[str, float]]


def language_model() -> Task:
    return building.task(LanguageModel, vocabulary=list("abcde"), sequence_length=6)


def multilabel(**arguments) -> Task:
    return building.task(Multilabel, keys=arguments, labels=["rain", "wind", "snow"])


def regression(targets: int = 2, **arguments) -> Task:
    return building.task(Regression, keys=arguments, targets=["height", "weight"][:targets])


def segmentation(**arguments) -> Task:
    return building.task(Segmentation, keys=arguments, classes=["ground", "water", "cloud"], image_size=8)


def softmax(logits: np.ndarray, axis: int) -> np.ndarray:
    power = np.exp(logits)
    return power / power.sum(axis, keepdims=True)


def counted(logits: np.ndarray, target: np.ndarray, axis: int, ignored: int) -> tuple[np.ndarray, ...]:
    """Cross-entropy, predicted and true class of each token or pixel that counts."""
    probability_NK = np.moveaxis(softmax(logits, axis), axis, -1)[target != ignored]
    true_N = target[target != ignored].astype(int)
    return -np.log(probability_NK[np.arange(len(true_N)), true_N]), probability_NK.argmax(1), true_N


# --- Each case: a task, outputs, targets, and the loss and metrics of all samples ---


def case_of_sequences() -> Case:
    """Sequences of different lengths, padded to six tokens; one is empty."""
    random = np.random.default_rng(0)
    target_BT = random.integers(0, 5, (9, 6))
    for row, length in zip(target_BT, [6, 1, 4, 0, 6, 2, 3, 6, 5], strict=True):
        row[length:] = PADDING
    logits_BTV = random.normal(size=(9, 6, 5)) * 2
    loss_N, guess_N, true_N = counted(logits_BTV, target_BT, 2, PADDING)
    expected = {"loss": loss_N.mean(), "perplexity": np.exp(loss_N.mean()), "acc": (guess_N == true_N).mean()}
    return language_model(), logits_BTV, target_BT, expected


def labels(threshold: float, pos_weight: list[float] | None = None) -> Case:
    random = np.random.default_rng(0)
    logits_BL, target_BL = random.normal(size=(50, 3)) * 3, random.integers(0, 2, (50, 3)).astype(np.uint8)
    probability_BL, factor_L = 1 / (1 + np.exp(-logits_BL)), np.array(pos_weight or [1, 1, 1])
    loss_BL = factor_L * target_BL * np.log(probability_BL) + (1 - target_BL) * np.log(1 - probability_BL)
    present_BL = probability_BL > threshold
    f1_L = 2 * (present_BL & target_BL).sum(0) / (present_BL.sum(0) + target_BL.sum(0))
    expected = {"loss": -loss_BL.mean(), "f1": f1_L.mean(), "acc": (present_BL == target_BL).mean()}
    return multilabel(threshold=threshold, pos_weight=pos_weight), logits_BL, target_BL, expected


def small_logits() -> Case:
    """They are not taken for probabilities."""
    expected = {"loss": np.log(1 + np.exp(-0.1)), "f1": 1.0, "acc": 1.0}
    return multilabel(), np.full((4, 3), 0.1), np.ones((4, 3), dtype=int), expected


def numbers(offset: float = 0.0, scale: float = 1.0, *, single: bool = False) -> Case:
    """`single`: one target, without a dimension of its own."""
    random = np.random.default_rng(0)
    target_BT = offset + scale * random.normal(size=(50, 2)) * np.array([1, 10])
    output_BT = target_BT + scale * random.normal(size=(50, 2))
    if single:
        target_BT, output_BT = target_BT[:, :1], output_BT[:, :1]
    error_BT, deviation_BT = output_BT - target_BT, target_BT - target_BT.mean(0)
    mse, r2_T = (error_BT**2).mean(), 1 - (error_BT**2).sum(0) / (deviation_BT**2).sum(0)
    expected = {"loss": mse, "rmse": np.sqrt(mse), "mae": np.abs(error_BT).mean(), "r2": r2_T.mean()}
    return regression(target_BT.shape[1]), output_BT, target_BT[:, 0] if single else target_BT, expected


def pixels() -> Case:
    """Images of which some have no pixel that counts, and a class that is rare."""
    random = np.random.default_rng(0)
    target_BHW = random.choice([0, 1, 2, IGNORED], size=(12, 5, 4), p=[0.5, 0.28, 0.02, 0.2]).astype(np.uint8)
    target_BHW[3] = IGNORED
    target_BHW[5, 1:] = IGNORED
    logits_BKHW = random.normal(size=(12, 3, 5, 4)) * 2
    loss_N, guess_N, true_N = counted(logits_BKHW, target_BHW, 1, IGNORED)
    iou = [((guess_N == k) & (true_N == k)).sum() / ((guess_N == k) | (true_N == k)).sum() for k in range(3)]
    expected = {"loss": loss_N.mean(), "iou": np.mean(iou), "acc": (guess_N == true_N).mean()}
    return segmentation(), logits_BKHW, target_BHW, expected


CASES: dict[str, Callable[[], Case]] = {
    "language model": case_of_sequences,
    "multilabel": lambda: labels(0.5),
    "multilabel, weighted": lambda: labels(0.2, [1.0, 5.0, 0.5]),
    "multilabel, small logits": small_logits,
    "regression": numbers,
    "regression, far from zero": lambda: numbers(offset=1e4),
    "regression, small": lambda: numbers(scale=1e-4),
    "regression, one target": lambda: numbers(single=True),
    "segmentation": pixels,
}


@pytest.mark.parametrize("batch", [1, 7, 50])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_metrics_are_those_of_all_samples_whatever_the_batches(case, batch):
    """Every token and every pixel that counts weighs the same."""
    task, output, target, expected = CASES[case]()
    metrics = {name: metric.to(torch.float64) for name, metric in task.metrics().items()}
    weighted = weights = 0.0
    for i in range(0, len(target), batch):
        outputs, part = torch.tensor(output[i : i + batch]), {"target": torch.tensor(target[i : i + batch])}
        loss_B, weight_B = task.loss(outputs, part), task.weight(part)
        weight_B = torch.ones_like(loss_B) if weight_B is None else weight_B
        weighted, weights = weighted + float((loss_B * weight_B).sum()), weights + float(weight_B.sum())
        for metric in metrics.values():
            metric.update(*task.metric_inputs(outputs, part))
    found = {"loss": weighted / weights, **{name: float(metric.compute()) for name, metric in metrics.items()}}
    assert found == pytest.approx(expected, rel=1e-6)


# --- What single tasks do ---


def test_the_perplexity_of_an_improbable_token_is_finite():
    metric = language_model().metrics()["perplexity"]
    metric.update(torch.tensor([[0.0, 200.0], [0.0, 0.0]]), torch.tensor([0, PADDING]))
    metric.update(torch.tensor([[200.0, 0.0]] * 9), torch.zeros(9, dtype=torch.int64))
    assert float(metric.compute()) == pytest.approx(np.exp(20))


def test_predictions_are_columns_by_name():
    logits_BTV = torch.zeros(2, 6, 5)
    logits_BTV[0, -1, 3], logits_BTV[1, -1, 0], logits_BTV[:, :-1, 1] = 9, 9, 9
    assert language_model().predictions(logits_BTV)["token"] == ["d", "a"]  # after the sequence
    assert LanguageModel.network_arguments(language_model().metadata) == {"vocabulary_size": 5, "sequence_length": 6}
    found = multilabel().predictions(torch.tensor([[4.0, -4.0, 4.0], [-4.0, -4.0, -4.0]]))
    assert (found["labels"], found["probabilities"].shape) == ([["rain", "snow"], []], (2, 3))
    columns = regression().predictions(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert {name: column.tolist() for name, column in columns.items()} == {"height": [1.0, 3.0], "weight": [2.0, 4.0]}


def test_the_loss_of_regression_is_the_mean_over_targets():
    _, output_BT, target_BT, _ = numbers()
    output, batch, distance_BT = (
        torch.tensor(output_BT),
        {"target": torch.tensor(target_BT)},
        np.abs(output_BT - target_BT),
    )
    assert regression(loss="mae").loss(output, batch).numpy() == pytest.approx(distance_BT.mean(1))
    huber_BT = np.where(distance_BT < 0.5, distance_BT**2 / 2, 0.5 * (distance_BT - 0.25))
    assert regression(loss="huber", huber_delta=0.5).loss(output, batch).numpy() == pytest.approx(huber_BT.mean(1))
    # whole numbers are compared in single precision
    output, target = torch.tensor([[1000.0], [1.0]], dtype=torch.bfloat16), torch.tensor([1001, 3])
    assert regression(1).loss(output, {"target": target}).tolist() == [1.0, 4.0]


def test_r2_of_a_constant_target_and_of_a_process_without_samples():
    (_, output_BT, target_BT, expected), one, other = numbers(), R2(2).to(torch.float64), R2(2).to(torch.float64)
    one.update(torch.tensor(output_BT), torch.tensor(target_BT))
    one.merge_state(other)
    assert float(one.compute()) == pytest.approx(expected["r2"])
    assert R2(1)(torch.tensor([2.0, 2.0]), torch.tensor([2.0, 2.0])) == 1
    assert R2(1)(torch.tensor([2.0, 2.5]), torch.tensor([2.0, 2.0])) == 0
    for output, target in (([2.0, math.nan], [1.0, 2.0]), ([2.0, math.nan], [2.0, 2.0]), ([2.0, 2.0], [1.0, math.nan])):
        assert R2(1)(torch.tensor(output), torch.tensor(target)).isnan()


def test_an_image_without_a_pixel_that_counts_has_no_loss_and_no_gradient():
    task, logits_BKHW, target_BHW, _ = pixels()
    logits, batch = torch.tensor(logits_BKHW[3:4], requires_grad=True), {"target": torch.tensor(target_BHW[3:4])}
    loss_B = task.loss(logits, batch)
    loss_B.sum().backward()
    assert (loss_B.tolist(), task.weight(batch).tolist(), logits.grad.abs().sum().item()) == ([0.0], [0.0], 0.0)


def test_the_dice_loss_is_that_of_the_formula():
    _, logits_BKHW, target_BHW, _ = pixels()
    expected = []
    for probability_KHW, target_HW in zip(softmax(logits_BKHW, 1), target_BHW, strict=True):
        counts = target_HW != IGNORED
        pairs = [(probability_KHW[k][counts], target_HW[counts] == k) for k in range(3)]
        expected.append(1 - np.mean([(2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1) for p, t in pairs]))
    batch, logits = {"target": torch.tensor(target_BHW)}, torch.tensor(logits_BKHW)
    added = segmentation(dice=0.5).loss(logits, batch) - segmentation().loss(logits, batch)
    assert added.numpy() == pytest.approx(0.5 * np.array(expected))


@pytest.mark.parametrize(("make", "told"), [
    (lambda: multilabel(pos_weight=[1.0, 2.0]), r"task.pos_weight has 2 numbers; the data has 3 labels"),
    (lambda: multilabel(threshold=1.5), r"task.threshold=1.5"),
    (lambda: building.task(Classification, keys={"loss": "bce", "class_weights": [1, 1]}, classes=["a"]), r"task.class_weights has no effect with task.loss=bce"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(make, told):
    with pytest.raises(UserError, match=told):
        make()


class Boxed(Task):
    def metrics(self) -> dict[str, Metric]:
        return {"boxes": MeanAveragePrecision()}


@pytest.mark.parametrize(("monitor", "name"), [
    ("val/loss", "boxes map"), ("val/boxes/map_50", "boxes map_50"), (None, "loss"),
])  # fmt: skip
def test_the_primary_metric_is_the_first_value_of_a_metric_with_several(monitor, name):
    values = {"test/boxes/map": 0.25, "test/boxes/map_50": 0.75} if monitor else {}
    tested = " | ".join(["test/loss", "test/count", *values])
    report = {
        "monitor": monitor,
        "test/loss": 0.5,
        "test/count": 7,
        "unit": "images",
        "evaluated": tested,
        "status": "done",
    }
    expected = {"boxes map": "0.2500", "boxes map_50": "0.7500", "loss": "0.5000"}[name]
    assert headline(building.task(Boxed), {**report, **values}) == (f"test {name}", f"{expected} on 7 images", None)


def test_a_classification_that_does_not_measure_accuracy_has_another_primary_metric():
    class Other(Classification):
        def metrics(self) -> dict[str, Metric]:
            return {"mean": MeanMetric()}

    report = {"monitor": "val/loss", "test/loss": 0.5, "test/mean": 0.25, "test/count": 7, "unit": "images"}
    report |= {"evaluated": "test/loss | test/count | test/mean", "status": "done"}
    task = building.task(Other, classes=["a"])
    assert headline(task, report) == ("test mean", "0.2500 on 7 images", None)


def test_a_task_refuses_what_0_2_called_its_methods():
    with pytest.raises(UserError, match="`bind` of a task is gone"):
        type("Old", (Task,), {"bind": None})


BOXES = {"boxes": [torch.zeros(1, 4), torch.zeros(3, 4)], "labels": [torch.zeros(1), torch.zeros(3)]}


@pytest.mark.parametrize(("target", "fits"), [
    (torch.arange(2), True), (["a", "b"], True), ((1, 2.5), True),
    (torch.zeros(2, 3), False), (BOXES, False), (BOXES["boxes"], False), ({"a": 1}, False), ("ab", False),
])  # fmt: skip
def test_targets_with_a_value_per_sample_are_a_column(target, fits):
    assert building.task(Task).targets({"target": target}) == ({"target": target} if fits else {})
