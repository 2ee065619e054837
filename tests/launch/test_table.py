"""What was typed for a job of a sweep goes into its report, and comes back as it was."""

import json
import re
from pathlib import Path

from lockstep.launch import sweeps
from lockstep.reporting.console import differences, sweep_table

TYPED = [
    "seed=0",
    "data.root='/with space/[it\\'s]'",
    "data.mean=[0.1, 0.2]",
    "callbacks=[default,ema]",
    "+model.x={a: ':smile:'}",
]


def record(folder: Path, *overrides: str) -> dict[str, str]:
    sweeps.record(folder, ["run=sweep/0", "resume=auto", *overrides], failed=True)
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
    sweep_table(rows, [], ["status"], tmp_path / "results.csv")
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
    assert sweeps.columns([module, task, {"status": "failed"}]) == [
        "status", "test/acc", "test_count", "test_loss", "val_loss", "val/acc", "train/steps", "wall_s",
    ]  # fmt: skip


def test_jobs_that_differ_by_seed_or_fold_have_a_mean_and_a_spread(tmp_path, capsys):
    def row(overrides: str, acc: float | None, status: str = "done") -> dict:
        return {
            "run": "s/0",
            "overrides": overrides,
            "status": status,
            "test/acc": acc,
            "evaluated": "test/acc",
            "wall_s": 2.0,
        }

    rows = [row("optim=sgd seed=0", 0.5), row("optim=sgd seed=1", 0.7), row("optim=adam seed=0", 0.9), row("optim=sgd seed=2", None, "failed"),
            row("data.fold=0 data.folds=2", 0.1), row("data.fold=1 data.folds=2", 0.3)]  # fmt: skip
    found = sweeps.spread(rows)
    assert [(each["run"], each["overrides"], round(each["test/acc"], 6)) for each in found] == [
        ("mean of 2", "optim=sgd", 0.6), ("deviation of 2", "optim=sgd", 0.141421),
        ("mean of 2", "data.folds=2", 0.2), ("deviation of 2", "data.folds=2", 0.141421),
    ]  # fmt: skip
    sweep_table(rows, found, sweeps.columns(rows), tmp_path / "results.csv")
    assert re.search(r"mean of 2 +│ optim=sgd ", capsys.readouterr().out)
