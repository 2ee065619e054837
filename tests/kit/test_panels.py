"""Panels of the test set: their figures are those of plain references, however the samples are divided among processes."""

import math

import building
import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torchmetrics.classification import (
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassJaccardIndex,
    MultilabelAveragePrecision,
)

from lockstep.kit.panels import Kept, PrecisionRecall, Share, Table, largest, wilson
from lockstep.kit.task import Task
from lockstep.kit.tasks import Classification, LanguageModel, Multilabel, Regression, Segmentation

random = torch.Generator().manual_seed(0)


def shown(task: Task, outputs, targets, *, world: int = 2) -> list:
    """The contents of all panels, after the states of `world` processes were put together as torchmetrics does."""
    each = [task.test_panels() for _ in range(world)]
    for rank, panels in enumerate(each):
        for index in torch.arange(rank, len(targets), world).chunk(2):
            output, batch = outputs[index], {"target": targets[index], "index": index}
            for panel in panels.values():
                panel.update(output, batch, task.loss(output, batch))
    for name, panel in each[0].items():
        for state, reduction in panel._reductions.items():
            parts = torch.stack([getattr(panels[name], state) for panels in each])
            setattr(panel, state, reduction(parts) if reduction else parts)
    return [content for panel in each[0].values() for content in panel.contents()]


LOGITS, CLASSES = torch.randn(200, 5, generator=random), torch.randint(5, (200,), generator=random)
LOGITS[torch.arange(150), CLASSES[:150]] += 2


def test_classes_are_counted_as_torchmetrics_does():
    task = building.task(Classification, classes=list("abcde"))
    matrix, table, curves, calibration, bins = shown(task, LOGITS, CLASSES)
    assert matrix.values == MulticlassConfusionMatrix(5)(LOGITS, CLASSES).tolist()
    f1 = MulticlassF1Score(5, average="none")(LOGITS, CLASSES)
    assert [row[4] for row in table.rows] == pytest.approx(f1.tolist())
    right = (LOGITS.argmax(1) == CLASSES) & (CLASSES == 2)
    assert table.rows[2][:3] == ("c", int((CLASSES == 2).sum()), Share(int(right.sum()), int((CLASSES == 2).sum())))
    error = MulticlassCalibrationError(5, n_bins=15)(LOGITS.softmax(1), CLASSES)
    assert f"error {error:.4f}" in calibration.note
    assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in calibration.series["measured"])
    assert (sum(bins.counts), len(bins.edges)) == (200, 16)
    assert len(curves.series) == 5
    hundred = building.task(Classification, classes=[str(n) for n in range(100)])  # shows the most frequent confusions
    target = torch.arange(100).repeat(4)
    guess = target.clone()
    guess[[7, 107, 207]] = 9
    guess[[20, 120]] = 3
    pairs, *_ = shown(hundred, F.one_hot(guess, 100).float(), target)
    assert [row[:3] for row in pairs.rows] == [("7", "9", 3), ("20", "3", 2)]


def test_with_bce_the_probability_of_a_class_is_its_sigmoid():
    """As the loss takes it: each class against the rest."""
    task = building.task(Classification, keys={"loss": "bce"}, classes=list("abcde"))
    probability_B, guess_B = LOGITS.sigmoid().max(1)
    found = task.predictions(LOGITS)
    torch.testing.assert_close(found["probability"], probability_B)
    assert found["class"] == ["abcde"[place] for place in guess_B] and task.activation == "sigmoid"
    torch.testing.assert_close(task.top(LOGITS, 2)["probability_2"], LOGITS.sigmoid().topk(2, 1).values[:, 1])
    *_, calibration, _ = shown(task, LOGITS, CLASSES)
    gap = float((probability_B - (guess_B == CLASSES).float()).mean().abs())
    assert float(calibration.note.split()[3].rstrip(".")) >= gap - 1e-4  # bins can only add to it


def test_precision_over_recall_is_torchmetrics():
    """Of probabilities that lie in the middle of the panel's bins."""
    task = building.task(Multilabel, labels=list("abcdefghi"))
    logits = (torch.randn(60, 9, generator=random) * 2).floor() / 2 + 0.25
    target = torch.randint(2, (60, 9), generator=random)
    target[:, 4] = 0
    _, curves = shown(task, logits, target)
    present = [place for place in range(9) if place != 4]
    average = MultilabelAveragePrecision(8, average="none")(logits.sigmoid()[:, present], target[:, present])
    found = {name[0]: float(name[3:-1]) for name in curves.series}
    # the sigmoid of equal logits may differ in its last bit, which breaks ties there
    assert found == pytest.approx({"abcdefghi"[p]: float(v) for p, v in zip(present, average, strict=True)}, abs=4e-3)
    assert list(found.values()) == sorted(found.values())
    assert float(curves.note.split()[3].rstrip(".")) == pytest.approx(sum(found.values()) / 8, abs=1e-3)
    assert all(points[-1][0] == 1 and points[0][0] == 0 for points in curves.series.values())
    assert PrecisionRecall(["a"], task.metric_inputs).contents() == []


def test_pixels_that_are_ignored_do_not_count():
    task = building.task(Segmentation, keys={"ignore_index": 255}, classes=["back", "leaf", "stem"])
    logits = torch.randn(6, 3, 4, 4, generator=random)
    target = torch.randint(3, (6, 4, 4), generator=random)
    target[:, 0] = 255
    matrix, table = shown(task, logits, target)
    iou = MulticlassJaccardIndex(3, average="none", ignore_index=255)(logits, target)
    assert [row[2] for row in table.rows] == pytest.approx(iou.tolist())
    assert sum(map(sum, matrix.values)) == 6 * 4 * 3


def test_labels_are_counted():
    task = building.task(Multilabel, keys={"threshold": 0.4}, labels=["rain", "snow"])
    logits, target = torch.randn(50, 2, generator=random), torch.randint(2, (50, 2), generator=random)
    table, _ = shown(task, logits, target)
    guess = (logits.sigmoid() > 0.4).long()
    for place, (name, count, recall, precision, f1) in enumerate(table.rows):
        a, b = target[:, place], guess[:, place]
        both = int((a & b).sum())
        assert (name, count) == (["rain", "snow"][place], int(a.sum()))
        assert (recall, precision) == (Share(both, int(a.sum())), Share(both, int(b.sum())))
        assert f1 == pytest.approx(2 * both / int(a.sum() + b.sum()))


def metric_and_column(
    task: Task, logits: torch.Tensor, target: torch.Tensor, metric: str, column: str
) -> tuple[float, list[float]]:
    """A macro metric of the task, and what it should be the mean of: the column of the report's table."""
    computed, batch = task.metrics()[metric], {"target": target}
    computed.update(*task.metric_inputs(logits, batch))
    table = next(each for each in shown(task, logits, target) if isinstance(each, Table) and column in each.columns)
    return float(computed.compute()), [row[list(table.columns).index(column)] for row in table.rows]


@pytest.mark.parametrize("right", [1.0, 0.7])
def test_a_mean_over_labels_or_classes_is_of_those_that_occur_or_are_predicted(right):
    """The third never occurs; a perfect network scores 1. The report's table has the addends."""
    labels, classes = (
        building.task(Multilabel, labels=["a", "b", "c", "d"]),
        building.task(Segmentation, classes=["a", "b", "c", "d"]),
    )
    target_BL = torch.randint(2, (40, 4), generator=random)
    target_BL[:, 2] = 0
    target_BHW = torch.tensor([0, 1, 3])[torch.randint(3, (6, 4, 4), generator=random)]
    guess_BL = (
        torch.where(torch.rand(40, 4, generator=random) < right, target_BL, 1 - target_BL) if right < 1 else target_BL
    )
    guess_BL[:, 2] = 0
    guess_BHW = torch.where(torch.rand(6, 4, 4, generator=random) < right, target_BHW, target_BHW.flip(0))
    logits_BKHW = torch.nn.functional.one_hot(guess_BHW, 4).permute(0, 3, 1, 2) * 9.0
    for task, logits, target, names in (
        (labels, guess_BL * 8.0 - 4, target_BL, ("f1", "F1")), (classes, logits_BKHW, target_BHW, ("iou", "IoU")),
    ):  # fmt: skip
        value, column = metric_and_column(task, logits, target, *names)
        known = [each for each in column if not math.isnan(each)]
        assert len(known) == 3 and math.isnan(column[2])
        assert value == pytest.approx(sum(known) / 3)
        assert (value == 1) == (right == 1)
    nothing = labels.metrics()["f1"]
    nothing.update(torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.long))
    assert nothing.compute() == 1


@pytest.mark.parametrize("shape", [(3000, 2), (40,)])
def test_a_fixed_sample_of_targets_is_drawn(shape):
    names = ["price", "rent"][: 2 if len(shape) == 2 else 1]
    task = building.task(Regression, targets=names)
    target = torch.randn(shape, generator=random)
    output = (target + 0.1 * torch.randn(shape, generator=random)).reshape(len(target), -1)
    alone, shared = (shown(task, output, target, world=world) for world in (1, 2))
    assert alone == shared
    assert len(alone) == 2 * len(names)
    scatter, residuals = alone[:2]
    pairs = set(zip(target.view(len(target), -1)[:, 0].tolist(), output[:, 0].tolist(), strict=True))
    assert set(scatter.points) <= pairs
    assert len(scatter.points) == min(1000, len(target)) == sum(residuals.counts)
    assert ("random sample of 1,000 out of 3,000" in scatter.note) == (len(target) > 1000)
    errors = np.array([guess - wanted for wanted, guess in scatter.points])
    assert residuals.counts == np.histogram(errors, residuals.edges)[0].tolist()


def test_the_loss_of_each_position_is_averaged():
    task = building.task(LanguageModel, vocabulary=list("abcd"), sequence_length=6)
    logits, target = torch.randn(10, 6, 4, generator=random), torch.randint(4, (10, 6), generator=random)
    target[3:, 4:] = -100
    target[:, 5] = -100
    (lines,) = shown(task, logits, target)
    loss = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
    wanted = [loss[:, t].sum().item() / int((target[:, t] >= 0).sum()) for t in range(5)]
    assert [x for x, _ in lines.series["loss"]] == [1, 2, 3, 4, 5]
    assert [y for _, y in lines.series["loss"]] == pytest.approx(wanted, rel=1e-5)
    facts = task.describe(logits, {"target": target})
    assert [len(each["text"].pieces) for each in facts] == [5 if n < 3 else 4 for n in range(10)]


def test_the_largest_losses_are_found_whatever_the_batches():
    loss = torch.randint(0, 50, (500,), generator=random).float()  # with many equal ones
    loss[77] = math.nan
    order = sorted(range(500), key=lambda i: (0 if i == 77 else 1, -loss[i].item(), i))[:24]
    for parts in (1, 7, 500):
        worst = Kept(24, by_loss=True)
        for chunk in torch.arange(500).flip(0).chunk(parts):
            worst.update(None, {"index": chunk}, loss[chunk])
        assert [index for index, _ in worst.found()] == order
    few = Kept(24, by_loss=True)
    few.update(None, {"index": torch.tensor([4, 2])}, torch.tensor([1.0, 1.0]))
    assert few.found() == [(2, 1.0), (4, 1.0)]  # the smaller index first
    assert largest(2, torch.tensor([1, 3, 3]), torch.tensor([0, 9, 1]))[1].tolist() == [1, 9]


@pytest.mark.parametrize(("right", "count"), [(930, 1000), (0, 20), (20, 20), (1, 2), (999_999, 1_000_000)])
def test_intervals_are_wilsons(right, count):
    """The ends are the shares of which `right` is 1.96 standard deviations away."""
    low, high = wilson(right, count)
    p = right / count
    assert 0 <= low <= p <= high <= 1
    for end in (low, high):
        away = 1.959963984540054 * math.sqrt(end * (1 - end) / count)
        assert abs(p - end) == pytest.approx(away, abs=1e-12)
    assert wilson(0, 0) == (0.0, 1.0)


def test_a_sample_is_described_by_its_task():
    task = building.task(Classification, classes=["cat", "dog"])
    (facts,) = task.describe(torch.tensor([[0.0, 2.0]]), {"target": torch.tensor([0])})
    assert (facts["target"], facts["prediction"]) == ("cat", "dog")
    assert facts["P(dog)"] == pytest.approx(1 / (1 + math.exp(-2)))
    own = building.task(Task)
    two, pictures = {"target": torch.tensor([5, 6]), "index": torch.arange(2)}, torch.ones(2, 3, 32, 32)
    assert own.describe(torch.ones(2, 3), two) == [{"target": t, "output": [1.0] * 3} for t in (5, 6)]
    assert own.describe(pictures, two) == [{"target": 5}, {"target": 6}]
    assert own.describe({"class": torch.ones(2), "map": pictures}, two) == [{"target": t, "class": 1.0} for t in (5, 6)]
    ragged = {"target": [{"boxes": torch.ones(3, 4)}, {"boxes": torch.ones(0, 4)}], "index": torch.arange(2)}
    assert own.describe(ragged["target"], ragged) == [{}, {}]
    assert own.describe((pictures, pictures), {"index": torch.arange(2)}) == [{}, {}]
