"""Each task that is shipped: its config builds it, its figures have the monitored one, and missing facts are named."""

import pytest

from lockstep import Task, build
from lockstep.config.checks import resolve
from lockstep.config.compose import options
from lockstep.config.instantiate import create_object
from lockstep.errors import UserError
from lockstep.kit import tasks

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
REPORT = {"test/count": 1000, "unit": "images", **{f"test/{metric}": 0.5 for metric in HEADLINES.values()}}


@pytest.mark.parametrize("name", NAMES)
def test_a_config_builds_its_task_and_names_a_metric_of_it(name):
    cfg = resolve([f"task={name}", "+task.metrics.more._target_=torchmetrics.MeanMetric"])
    task: Task = create_object(cfg.task, "task")
    with pytest.raises(UserError, match=f"needs {', '.join(task.needs)} in the `metadata`"):
        task.bind({"channels": 3})
    task.bind(ABOUT)
    expected = (f"test {HEADLINES[name]}", "0.5000 on 1,000 images")
    if name in ("classification", "classifier"):
        expected = ("test accuracy", "50.00% of 1,000 images")
    assert task.primary_metric({**REPORT, "monitor": cfg.checkpoint.monitor}) == expected
    assert set(build.metrics(task, cfg.task.parts("metrics"))) == {*task.metrics(), "more"}
    shown = {column for _, _, columns in task.curves() for column in columns}
    assert shown == {"train/loss", "val/loss", *(f"val/{figure}" for figure in task.metrics())}
    assert (cfg.checkpoint.monitor, cfg.checkpoint.mode) == (cfg.task.get("monitor"), cfg.task.get("mode"))
    for argument in {"class_weights", "pos_weight"} & cfg.task.kwargs.keys():
        with pytest.raises(UserError, match=f"task.{argument} has 3 numbers; the data has 2"):
            create_object(cfg.task.replace(**{argument: [1.0, 2.0, 3.0]}), "task").bind(ABOUT)


def test_every_task_has_a_config():
    targets = {resolve([f"task={name}"]).task.target for name in NAMES}
    every = [name for name, kind in vars(tasks).items() if isinstance(kind, type) and issubclass(kind, Task)]
    assert targets - {"project.module.Classifier"} == {f"lockstep.kit.tasks.{name}" for name in every}
