"""Each task that is shipped: its config builds it, its figures have the monitored one, and missing facts are named."""

import pytest

from lockstep import CONFIGS, build, tasks
from lockstep.config.checks import about_problems, check
from lockstep.config.compose import compose_config
from lockstep.config.instantiate import create
from lockstep.config.settings import Settings
from lockstep.errors import UserError
from lockstep.tasks import Task

ABOUT = {**{key: ["a", "b"] for key in ("classes", "labels", "targets", "vocabulary")}, "sequence_length": 4}
NAMES = sorted({path.stem for path in (CONFIGS / "task").glob("*.yaml")} - {"lightning_module", "own"})
HEADLINES = {
    "classification": "acc",
    "multilabel": "f1",
    "regression": "rmse",
    "segmentation": "iou",
    "language_model": "perplexity",
}
REPORT = {"test/count": 1000, "unit": "images", **{f"test/{metric}": 0.5 for metric in HEADLINES.values()}}


@pytest.mark.parametrize("name", NAMES)
def test_a_config_builds_its_task_names_a_figure_of_it_and_has_its_traits(name):
    cfg = compose_config("train", [f"task={name}", "+task.metrics.more._target_=torchmetrics.MeanMetric"])
    task: Task = create(cfg.task, "task")
    needs, settings = f"needs {', '.join(task.needs)}", Settings.of(cfg)
    with pytest.raises(UserError, match=f"{needs} in the `about`"):
        task.bind({"channels": 3})
    assert any(needs in problem for problem in about_problems(settings, {}))
    task.bind(ABOUT)
    expected = (f"test {HEADLINES[name]}", "0.5000 on 1,000 images")
    if name == "classification":
        expected = ("test accuracy", "50.00% of 1,000 images")
    assert task.headline({**REPORT, "monitor": cfg.task.monitor}) == expected
    assert set(build.metrics(task, cfg.task.metrics)) == {*task.metrics(), "more"}
    shown = {column for _, _, columns in task.panels() for column in columns}
    assert shown == {"train/loss", "val/loss", *(f"val/{figure}" for figure in task.metrics())}
    assert (cfg.checkpoint.monitor, cfg.checkpoint.mode) == (cfg.task.monitor, cfg.task.mode)
    traits = cfg.task.traits
    assert (list(traits.needs), list(traits.metrics)) == (list(task.needs), list(task.metrics()))
    for argument, of in traits.one_each.items():
        cfg.task[argument] = [1.0, 2.0, 3.0]
        told = f"task.{argument} has 3 numbers; the data has 2 {of}"
        with pytest.raises(UserError, match=told):
            create(cfg.task, "task").bind(ABOUT)
        assert any(told in problem for problem in about_problems(Settings.of(cfg), ABOUT))


def test_every_task_has_a_config():
    targets = {compose_config("train", [f"task={name}"]).task["_target_"] for name in NAMES}
    assert targets == {f"lockstep.tasks.{name}" for name in tasks.__all__ if name != "Task"}


@pytest.mark.parametrize("wrong", [
    "checkpoint.monitor=val/nothing", "task.monitor=val/nothing", "task.monitor=val/ac",
    "callbacks=[early_stopping] callbacks.early_stopping.monitor=val/nothing",
    "callbacks=[early_stopping] callbacks.early_stopping.monitor=train/acc",
    "schedule=cosine trainer.max_epochs=-1", "schedule=linear trainer.max_epochs=-1 trainer.max_time={hours:1}",
])  # fmt: skip
def test_what_no_run_can_do_is_told_without_torch(wrong):
    typed = wrong.split()
    key = "trainer.max_epochs=-1" if "schedule" in wrong else typed[-1]
    problems = check(compose_config("train", ["trainer.accelerator=cpu", *typed]))
    assert len(problems) == 1
    assert key in problems[0]


@pytest.mark.parametrize("monitor", ["train/loss", "train/lr", "val/loss", "train/images_per_s"])
def test_a_callback_may_watch_what_a_run_logs(monitor):
    typed = ["callbacks=[default,early_stopping]", f"callbacks.early_stopping.monitor={monitor}"]
    assert check(compose_config("train", ["trainer.accelerator=cpu", *typed])) == []
