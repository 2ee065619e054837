"""The jobs of a multirun: who gets which devices, and what of them the table of results shows."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from lockstep.config.compose import compose_config
from lockstep.errors import UserError
from lockstep.launch import sweeps
from lockstep.machine import world
from lockstep.run import RunFolder


def record(folder: Path, *overrides: str) -> dict[str, str]:
    sweeps.record(RunFolder(folder), ["run=sweep/0", "resume=auto", *overrides], failed=True)
    return {"run": folder.name, **json.loads((folder / "report.json").read_text())}


def test_overrides_are_recorded_as_they_are_typed_and_the_table_shows_those_that_differ(tmp_path, capsys):
    shared = ["optim.lr=0.001", "data.root='/with space/[it\\'s]'"]
    rows = [
        record(tmp_path / "a", "seed=0", *shared, "data.mean=[0.1, 0.2]", "+model.x={a: ':smile:'}"),
        record(tmp_path / "b", "seed=1", *shared),
    ]
    assert rows[1]["overrides"].startswith("seed=1 optim.lr=0.001 ")
    own, other = sweeps.differences(rows)
    assert (own, other) == ("seed=0 'data.mean=[0.1, 0.2]' '+model.x={a: '\"'\"':smile:'\"'\"'}'", "seed=1")
    sweeps.print_table(rows, [], tmp_path / "results.csv")
    assert any(own in line for line in capsys.readouterr().out.splitlines())


def test_the_table_has_the_figures_that_were_tested_whatever_they_are_called():
    module = {"monitor": "val_loss", "val_loss": 0.5, "test_loss": 0.2, "evaluated": "test_loss | test_count"}
    task = {"monitor": "val/acc", "test/acc": 0.9, "test/count": 9, "evaluated": "test/acc | test/count"}
    assert sweeps.columns([module, task, {"status": "failed"}]) == [
        "status", "test/acc", "test_loss", "val_loss", "val/acc", "train/steps", "wall_s",
    ]  # fmt: skip


def test_jobs_that_differ_by_seed_or_fold_have_a_mean_and_a_spread(tmp_path, capsys):
    def row(overrides: str, acc: float | None, status: str = "done") -> dict:
        return {"run": "s/0", "overrides": overrides, "status": status, "test/acc": acc, "evaluated": "test/acc"}

    rows = [row("optim=sgd seed=0", 0.5), row("optim=sgd seed=1", 0.7), row("optim=adam seed=0", 0.9), row("optim=sgd seed=2", None, "failed"),
            row("data.fold=0 data.folds=2", 0.1), row("data.fold=1 data.folds=2", 0.3)]  # fmt: skip
    found = sweeps.spread(rows)
    assert [(each["run"], each["overrides"], round(each["test/acc"], 6)) for each in found] == [
        ("mean of 2", "optim=sgd", 0.6), ("deviation of 2", "optim=sgd", 0.141421),
        ("mean of 2", "data.folds=2", 0.2), ("deviation of 2", "data.folds=2", 0.141421),
    ]  # fmt: skip
    sweeps.print_table(rows, found, tmp_path / "results.csv")
    assert re.search(r"mean of 2 +│ optim=sgd ", capsys.readouterr().out)


GPUS = [
    (4, None, [], "auto", ["0", "1", "2", "3"]),
    (4, None, ["strategy=ddp", "trainer.devices=2"], "auto", ["0,1", "2,3"]),
    (4, None, ["strategy=ddp"], "auto", ["0,1,2,3"]),
    (4, None, [], 2, ["0", "1"]),
    (2, "GPU-a,GPU-b", [], "auto", ["GPU-a", "GPU-b"]),
    (3, "5,6,7", ["strategy=ddp", "trainer.devices=2"], "auto", ["5,6"]),
]
CORES = [([], "auto", 8, 1), ([], 2, 2, 4), (["strategy=ddp", "trainer.devices=2"], "auto", 4, 1), ([], 3, 3, 2)]


def test_each_job_has_gpus_of_its_own(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for count, visible, overrides, jobs, expected in GPUS:
        monkeypatch.setattr(world, "gpu_count", Mock(return_value=count))
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = sweeps.environments(compose_config("train", overrides), jobs)
        assert [environment["CUDA_VISIBLE_DEVICES"] for environment in found] == expected
    for jobs, told in ((3, "hydra.launcher.jobs=1"), (0, "auto, or a number"), ("two", "auto, or a number")):
        with pytest.raises(UserError, match=told):
            sweeps.environments(compose_config("train", ["strategy=ddp", "trainer.devices=2"]), jobs)


def test_jobs_on_a_cpu_share_its_cores(monkeypatch):
    monkeypatch.setattr(world, "gpu_count", lambda: 0)
    monkeypatch.setattr(sweeps, "cores", lambda: 8)
    for overrides, jobs, count, threads in CORES:
        found = sweeps.environments(compose_config("train", ["trainer.accelerator=cpu", *overrides]), jobs)
        assert found == [{"OMP_NUM_THREADS": str(threads)}] * count
