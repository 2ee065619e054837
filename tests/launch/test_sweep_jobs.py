"""The jobs of a multirun: who gets which devices, and what of them the table of results shows."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from lockstep.config.compose import compose_config, compose_each, expand_sweep
from lockstep.config.draft import Draft
from lockstep.errors import UserError
from lockstep.launch import sweeps
from lockstep.machine import world
from lockstep.run import RunFolder


def draft(*overrides: str) -> Draft:
    return Draft(compose_config("train", overrides))


def record(folder: Path, *overrides: str) -> dict[str, str]:
    sweeps.record_failure(RunFolder(folder), ["run=sweep/0", "resume=auto", *overrides])
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


GRIDS = [
    (["seed=0,1", "loader.fold=0,1"], None),
    (["seed=0,1,2", "loader.fold=0,1", "trainer.max_epochs=9"], None),
    (["seed=0", "loader.fold=0,1"], None),
    (["seed=range(2)", "loader.fold=range(2)"], None),
    (
        ["seed=0,1", "loader.fold=0,2"],
        "1 of this sweep ran with seed=0 loader.fold=1, but would now run with seed=0 loader.fold=2",
    ),
    (
        ["seed=0,1", "loader.fold=0,1,2"],
        "2 of this sweep ran with seed=1 loader.fold=0, but would now run with seed=0 loader.fold=2",
    ),
    (
        ["seed=0,1", "loader.fold=0,1", "optim.lr=1,2"],
        "0 of this sweep ran with seed=0 loader.fold=0, but would now run with",
    ),
]


def begin(folder: Path, *jobs: str) -> None:
    """Jobs that began with these overrides."""
    for place, overrides in enumerate(jobs):
        RunFolder(folder / str(place)).path.mkdir()
        RunFolder(folder / str(place)).write_report({"status": "failed", "overrides": overrides})
        (folder / str(place) / "config.yaml").touch()


@pytest.mark.parametrize(("overrides", "problem"), GRIDS)
def test_a_grid_with_other_values_does_not_continue_the_jobs_of_these_numbers(overrides, problem, tmp_path):
    assert not list(sweeps.numbering_problems(tmp_path, ["seed=7,8"]))  # no job has begun
    begin(tmp_path, *(f"seed={seed} loader.fold={fold}" for seed in (0, 1) for fold in (0, 1)))
    problems = list(sweeps.numbering_problems(tmp_path, overrides))
    assert [problem in each for each in problems] == [True] * bool(problem)


def test_a_job_of_an_earlier_sweep_than_the_last_is_not_continued_with_other_values(tmp_path):
    begin(tmp_path, "model.dropout_fc=0.1", "model.dropout_fc=0.5")
    assert not list(sweeps.numbering_problems(tmp_path, ["model.dropout_fc=0.1,0.5,0.9"]))
    (problem,) = sweeps.numbering_problems(tmp_path, ["model.dropout_fc=0.1,0.9"])
    assert "job 1 of this sweep ran with model.dropout_fc=0.5, but would now run with model.dropout_fc=0.9" in problem


def test_the_table_has_the_figures_that_were_tested_whatever_they_are_called():
    module = {"monitor": "val_loss", "val_loss": 0.5, "test_loss": 0.2, "evaluated": "test_loss | test_count"}
    task = {"monitor": "val/acc", "test/acc": 0.9, "test/count": 9, "evaluated": "test/acc | test/count"}
    assert sweeps.columns([module, task, {"status": "failed"}]) == [
        "status", "val_loss", "val/acc", "test/acc", "test_loss", "train/steps", "wall_s",
    ]  # fmt: skip


def test_jobs_that_differ_by_seed_or_fold_have_a_mean_and_a_spread(tmp_path, capsys):
    def row(overrides: str, acc: float | None, status: str = "done") -> dict:
        return {"run": "s/0", "overrides": overrides, "status": status, "test/acc": acc, "evaluated": "test/acc"}

    rows = [row("optim=sgd seed=0", 0.5), row("optim=sgd seed=1", 0.7), row("optim=adam seed=0", 0.9), row("optim=sgd seed=2", None, "failed"),
            row("loader.fold=0 loader.folds=2", 0.1), row("loader.fold=1 loader.folds=2", 0.3)]  # fmt: skip
    found = sweeps.spread(rows)
    assert [(each["run"], each["overrides"], round(each["test/acc"], 6)) for each in found] == [
        ("mean of 2", "optim=sgd", 0.6), ("deviation of 2", "optim=sgd", 0.141421),
        ("mean of 2", "loader.folds=2", 0.2), ("deviation of 2", "loader.folds=2", 0.141421),
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
        found = sweeps.environments(draft(*overrides), jobs)
        assert [environment["CUDA_VISIBLE_DEVICES"] for environment in found] == expected
    for jobs, told in ((3, "room for 1 job of 2 devices"), (0, "auto, or a number"), ("two", "auto, or a number")):
        with pytest.raises(UserError, match=told):
            sweeps.environments(draft("strategy=ddp", "trainer.devices=2"), jobs)


def test_jobs_on_a_cpu_share_its_cores(monkeypatch):
    monkeypatch.setattr(world, "gpu_count", lambda: 0)
    monkeypatch.setattr(sweeps, "cores", lambda: 8)
    for overrides, jobs, count, threads in CORES:
        found = sweeps.environments(draft("trainer.accelerator=cpu", "+trainer.unknown=1", *overrides), jobs)
        assert found == [{"OMP_NUM_THREADS": str(threads)}] * count


def test_a_glob_sweeps_over_the_options_that_it_matches():
    assert expand_sweep("schedule=glob(c*)") == ["schedule=constant", "schedule=cosine"]
    assert expand_sweep("schedule=glob([c*, step], exclude=cos*)") == ["schedule=constant", "schedule=step"]
    assert compose_each("train", ["schedule=glob(c*)", "seed=0,1"])[0] == []
    for given, told in (("schedule=glob(x*)", "use one of constant, cosine,"), ("seed=glob(*)", "use one of none")):
        assert told in compose_each("train", [given])[0][0]
