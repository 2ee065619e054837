"""What was typed for a job of a sweep goes into its report, and comes back as it was."""

import json
from pathlib import Path

from lockstep.reporting.console import differences, sweep_table
from lockstep.sweeps import table

TYPED = [
    "seed=0",
    "data.root='/with space/[it\\'s]'",
    "data.mean=[0.1, 0.2]",
    "callbacks=[default,ema]",
    "+model.x={a: ':smile:'}",
]


def record(folder: Path, *overrides: str) -> dict[str, str]:
    table.record(folder, ["run=sweep/0", "resume=auto", *overrides], failed=True)
    report: dict[str, str] = json.loads((folder / "report.json").read_text())
    return report


def test_values_with_spaces_and_brackets_are_told_apart(tmp_path, capsys):
    rows = [
        {"run": "a", **record(tmp_path / "a", *TYPED)},
        {"run": "b", **record(tmp_path / "b", *TYPED[:2], "seed=1")},
    ]
    own, other = differences(rows)
    assert own == "'data.mean=[0.1, 0.2]' 'callbacks=[default,ema]' '+model.x={a: '\"'\"':smile:'\"'\"'}'"
    assert other == "seed=1"
    sweep_table(rows, ["status"], tmp_path / "results.csv")
    lines = capsys.readouterr().out.splitlines()
    assert any(own in line for line in lines)


def test_plain_overrides_are_recorded_as_they_are_typed(tmp_path):
    assert record(tmp_path, "optim.lr=0.001", "seed=0", "model=timm")["overrides"] == "optim.lr=0.001 seed=0 model=timm"


def test_the_table_has_the_figures_that_were_tested_whatever_they_are_called():
    module = {
        "monitor": "val_loss",
        "val_loss": 0.5,
        "test_loss": 0.25,
        "test_count": 9,
        "evaluated": "test_loss | test_count",
    }
    task = {"monitor": "val/acc", "test/acc": 0.9, "test/count": 9, "evaluated": "test/acc | test/count"}
    assert table.columns([module, task, {"status": "failed"}]) == [
        "status", "test/acc", "test_count", "test_loss", "val_loss", "val/acc", "train/steps", "wall_s",
    ]  # fmt: skip
