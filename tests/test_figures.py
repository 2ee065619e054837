"""Figures of a task and of its config: logged by name, monitored by name, and refused where nothing has that name."""

import csv
import json
from pathlib import Path

import pytest

F1 = ["+task.metrics.f1._target_=torchmetrics.classification.MulticlassF1Score", "+task.metrics.f1.average=none"]
SHORT = ["trainer.max_steps=6", "data.batch_size=48", "trainer.accelerator=cpu", "optim.lr=3e-3", "run=a"]


def test_a_metric_with_a_value_for_each_class_is_logged_by_class_and_can_be_monitored(forked_command):
    monitor = ["checkpoint.monitor=val/f1/3", "trainer.val_check_interval=2", "checkpoint.save_top_k=2"]
    done = forked_command("train.py", *F1, *monitor, *SHORT)
    assert done.code == 0, done
    folder = forked_command.folder / "runs/a"
    report = json.loads((folder / "report.json").read_text())
    assert {name for name in report if "/f1" in name} == {
        f"{part}/f1/{i}" for part in ("val", "test") for i in range(10)
    }
    with (folder / "metrics.csv").open() as file:
        seen = [float(row["val/f1/3"]) for row in csv.DictReader(file) if row["val/f1/3"]]
    assert len(seen) == 3
    assert report["val/f1/3"] == max(seen)
    assert report["monitor"] == "val/f1/3"
    assert "test f1 3" in done.out  # the figure that people read first


@pytest.mark.parametrize(
    ("given", "near"),
    [
        (["checkpoint.monitor=val/f1/33"], "did you mean val/f1/3?"),
        (["checkpoint.monitor=val/f1"], "did you mean val/f1/"),  # there is one for each class
        (["task.monitor=val/acu"], "did you mean val/acc?"),
    ],
)
def test_a_figure_that_nothing_logs_cannot_be_monitored(given, near, forked_command):
    done = forked_command("train.py", *F1, *given, *SHORT)
    assert done.code == 2, done
    (line,) = done.err.splitlines()
    assert line.startswith(f"error: {given[0].partition('=')[0]}=val/")
    assert "the validation logs val/loss, val/acc, val/f1" in line
    assert near in line
    assert not Path(forked_command.folder, "runs").exists()


def test_a_metric_cannot_take_the_name_of_what_every_task_logs(forked_command):
    metric = "torchmetrics.classification.MulticlassAccuracy"
    done = forked_command("train.py", f"+task.metrics.loss._target_={metric}", *SHORT)
    assert (done.code, done.err) == (2, "error: task.metrics.loss: every task already logs loss. Use another name.\n")
    assert forked_command.files() == []
