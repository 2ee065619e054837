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
LOGGED = "the validation logs val/loss, val/acc, val/f1"


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (["checkpoint.monitor=val/f1/33"], ("checkpoint.monitor=val/f1/33", LOGGED, "did you mean val/f1/3?")),
        (["checkpoint.monitor=val/f1"], (LOGGED, "did you mean val/f1/")),  # there is one for each class
        (["task.monitor=val/acu"], ("task.monitor=val/acu", LOGGED, "did you mean val/acc?")),
        ([METRIC], ("task.metrics.loss: every task already logs loss.",)),
    ],
)
def test_a_name_that_nothing_logs_or_that_is_taken_is_rejected(given, parts, train):
    with pytest.raises(UserError) as error:
        train(*F1, *given, *SHORT)
    assert all(part in str(error.value) for part in parts), error.value
    assert not Path("runs").exists()
