"""Metrics of a task and of its config: logged by name, monitored by name, and rejected where nothing has that name."""

from pathlib import Path

import pytest
from in_process import rows

from lockstep.errors import UserError

F1 = ["+task.metrics.f1._target_=torchmetrics.classification.MulticlassF1Score", "+task.metrics.f1.average=none"]
SHORT = ["trainer.max_steps=6", "optim.lr=3e-3", "run=a"]


def test_a_metric_with_a_value_for_each_class_is_logged_by_class_and_can_be_monitored(train, capsys):
    monitor = ["checkpoint.monitor=val/f1/3", "trainer.val_check_interval=2", "checkpoint.save_top_k=2"]
    report = train(*F1, *monitor, *SHORT)
    assert {name for name in report if "/f1" in name} == {
        f"{part}/f1/{i}" for part in ("val", "test") for i in range(10)
    }
    seen = [float(row["val/f1/3"]) for row in rows("a") if row["val/f1/3"]]
    assert len(seen) == 3
    assert report["val/f1/3"] == max(seen)
    assert report["monitor"] == "val/f1/3"
    assert "test f1 3" in capsys.readouterr().out  # the metric that people read first


METRIC = "+task.metrics.loss._target_=torchmetrics.classification.MulticlassAccuracy"


def test_a_name_that_is_taken_is_rejected(train):
    with pytest.raises(UserError, match=r"`metrics` returns loss, which every task logs"):
        train(*F1, METRIC, *SHORT)
    assert not Path("runs").exists()
