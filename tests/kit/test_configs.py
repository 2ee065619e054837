"""Each task that is shipped: its config builds it, its figures have the monitored one, and missing facts are named."""

from typing import Any

import building
import pytest
from torchmetrics import MeanMetric

from lockstep.config import formatting
from lockstep.config.checks import resolve
from lockstep.config.compose import options
from lockstep.config.targets import target_of
from lockstep.errors import UserError
from lockstep.kit import tasks
from lockstep.kit.task import Task
from lockstep.reporting.report import headline

ABOUT = {**{key: ["a", "b"] for key in ("classes", "labels", "targets", "vocabulary")}, "sequence_length": 4}
NAMES = sorted({*options("task")} - {"lightning_module", "own"})
HEADLINES = {
    "classification": "acc",
    "classifier": "acc",
    "multilabel": "f1",
    "regression": "rmse",
    "segmentation": "iou",
    "language_model": "perplexity",
}
FIGURES = {f"test/{metric}": 0.5 for metric in HEADLINES.values()}
REPORT = {"test/count": 1000, "unit": "images", "status": "done", **FIGURES}


@pytest.mark.parametrize("name", NAMES)
def test_a_config_builds_its_task_and_names_a_metric_of_it(name):
    cfg = resolve([f"task={name}", "+task.metrics.more._target_=torchmetrics.MeanMetric"])
    kind: Any = target_of(cfg.task.target, "task")
    keys, more = cfg.task.without("name", "monitor", "mode", "metrics").kwargs, {"more": lambda _: MeanMetric()}
    with pytest.raises(UserError, match=f"needs {', '.join(kind.needs)} in the `metadata`"):
        building.task(kind, channels=3)
    task = building.task(kind, keys=keys, metrics=more, **ABOUT)
    expected = (f"test {HEADLINES[name]}", f"{formatting.metric(HEADLINES[name], 0.5)} on 1,000 images")
    if name in ("classification", "classifier"):
        expected = ("test accuracy", "50.00% of 1,000 images")
    tested = f"test/loss | test/{HEADLINES[name]} | test/count"
    report = {**REPORT, "test/loss": 0.1, "evaluated": tested, "monitor": cfg.checkpoint.monitor}
    assert headline(task, report)[:2] == expected
    assert set(task.measured("val")[1]) == {*task.metrics(), "more"}
    assert (cfg.checkpoint.monitor, cfg.checkpoint.mode) == (cfg.task.get("monitor"), cfg.task.get("mode"))
    for argument in {"class_weights", "pos_weight"} & cfg.task.kwargs.keys():
        with pytest.raises(UserError, match=f"task.{argument} has 3 numbers; the data has 2"):
            building.task(kind, keys={**keys, argument: [1.0, 2.0, 3.0]}, **ABOUT)


def test_every_task_has_a_config():
    targets = {resolve([f"task={name}"]).task.target for name in NAMES}
    every = [name for name, kind in vars(tasks).items() if isinstance(kind, type) and issubclass(kind, Task)]
    assert targets - {"project.module.Classifier"} == {f"lockstep.kit.tasks.{name}" for name in every}
