"""Which checkpoint a run keeps and tests."""

import json
from pathlib import Path

import pytest


@pytest.mark.parametrize("typed", ["task.monitor=null", "checkpoint.monitor=null trainer.limit_val_batches=0"])
def test_without_a_monitor_the_last_checkpoint_is_kept_and_tested(train, typed):
    report = train("run=a", "trainer.max_epochs=2", "optim.lr=0", *typed.split())
    assert (report["status"], report["monitor"], report["checkpoint"]) == ("done", None, "checkpoints/last.ckpt")
    assert [path.name for path in Path("runs/a/checkpoints").iterdir()] == ["last.ckpt"]
    assert ("val/acc" in report) == ("limit_val_batches=0" not in typed)
    assert report["test/count"] == 103
    assert "Test accuracy" in Path("runs/a/report.html").read_text()
    assert json.loads(Path("runs/a/report.json").read_text())["train/epochs"] == 2


def test_without_a_monitor_the_reports_validation_is_that_of_the_last_step(train):
    train("run=a", "trainer.max_epochs=2", "task.monitor=null")
    rows = [line.split(",") for line in Path("runs/a/metrics.csv").read_text().splitlines()]
    place = rows[0].index("val/loss")
    last = [row[place] for row in rows[1:] if row[place]][-1]
    assert json.loads(Path("runs/a/report.json").read_text())["val/loss"] == float(last)
