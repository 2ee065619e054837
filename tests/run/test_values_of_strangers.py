"""A report or a table of a run with values of the wrong kinds: each reader says so in a sentence or leaves the run out, with no traceback."""

import functools
import importlib
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoints import finding
from lockstep.config.checks import resolve
from lockstep.config.compose import compose_config
from lockstep.config.draft import Draft, as_yaml
from lockstep.errors import UserError
from lockstep.extras import comparison
from lockstep.launch import resuming, sweeps
from lockstep.launch.exits import exit_code
from lockstep.machine import files
from lockstep.reporting.report import Report
from lockstep.run import RunFolder, validation_metrics_at

ledger = importlib.import_module("runs")
compare_runs = importlib.import_module("compare_runs")
REPORT = {
    "status": "done", "run": "a", "monitor": "val/acc", "monitor_mode": "max", "val/acc": 0.9, "test/acc": 0.8, "test/count": 5,
    "evaluated": "test/acc | test/count", "unit": "images", "batch_size": 4, "train/steps": 3, "train/epochs": 1, "world_size": 1,
    "train/images_per_s": 5.0, "wall_s": 2.5, "data/name": "mnist", "data/sha256": "0", "started": "2026-01-01T00:00:00+0000",
    "overrides": "optim.lr=0.1", "checkpoint": "checkpoints/last.ckpt", "resumed_from": None,
}  # fmt: skip
METRICS = "step,val/acc\n1,0.5\n2,0.9\n"
DIGESTS = "step,what,name,digest\n1,gradient of rank 0,w,aa\n"


@functools.cache
def config_text() -> str:
    return as_yaml(resolve(["run=a"]))


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """The run a and, of the same kind, the run b and a sweep's jobs."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/a"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(config_text())
    (folder / "metrics.csv").write_text(METRICS)
    (folder / "digests.csv").write_text(DIGESTS)
    (folder / "report.json").write_text(json.dumps(REPORT))
    shutil.copytree(folder, "runs/b")
    shutil.copytree(folder, "runs/sweep/1")
    return folder


def called(main: Callable[[], Any], *argv: str) -> Callable[[], int]:
    def call() -> int:
        sys.argv = ["x", *argv]
        try:
            return exit_code(main)
        except SystemExit as e:
            return int(e.code or 0)

    return call


def resumed_config() -> Any:
    typed = ["run=a", "resume=auto"]
    return resuming.for_training(Draft(compose_config("train", typed)), typed)


def finished(folder: RunFolder) -> Any:
    cfg = resolve(["run=a", "resume=runs/a/checkpoints/last.ckpt"])
    return resuming.finished_run(resuming.Settings.of(cfg), 10)


def table_of_sweep() -> None:
    shutil.copytree("runs/a", "runs/sweep/0")
    sweeps.write_table(Path("runs/sweep"))


def read_everywhere(monkeypatch) -> None:
    """Each reader of a run's files: a sentence (UserError, exit code 2), or an answer."""
    monkeypatch.setattr(sys, "argv", [])
    for argv in ([], ["--json"], ["--csv"], ["--where", "status!=x", "--sort", "-val/acc"], ["html"], ["show", "a"], ["failed"], ["--sort", "wall_s"]):  # fmt: skip
        assert called(ledger.main, *argv)() == 0, argv
    for argv in (["a", "b"], ["b", "a"], ["a", "b", "--exact"]):
        assert called(compare_runs.main, *argv)() in (0, 1, 2)
    folder = RunFolder("runs/a")
    for use in (
        resumed_config, folder.saved_config, lambda: finished(folder), lambda: folder.truncate_logs(1), lambda: folder.drop_tests(["test/acc"]),
        lambda: Report(folder)._repr_html_(), lambda: Report(folder).curves,
        lambda: list(sweeps.numbering_problems(Path("runs/sweep"), [])), lambda: validation_metrics_at(folder.metrics(), 2, "val/acc"),
        lambda: list(comparison.first_different_digest(*(comparison.find(each, Path("runs")) for each in "ab"))),
    ):  # fmt: skip
        with suppress(UserError):
            use()
    table_of_sweep()


@pytest.mark.parametrize("text", ["[]", "5", "null", "{}", "{", '{"status": "done", "val/acc": NaN, "wall_s": 1e999}', "[" * 100_000], ids=lambda text: text[:30])  # fmt: skip
def test_a_report_that_is_none(text, run, monkeypatch):
    (run / "report.json").write_text(text)
    read_everywhere(monkeypatch)


def test_a_report_without_its_checkpoint_is_damaged(run):
    """The newest checkpoint was evaluated instead of the tested one."""
    (run / "report.json").write_text("{}")
    with pytest.raises(UserError, match=r"report\.json is damaged: it is not a report\. Remove the file"):
        finding.tested_checkpoint(str(run), "run")


TABLES = [
    "step,val/acc\n1.0,0.5\n2.0,0.9\n", "step,val/acc\n1,0.5\n,0.9\n", "val/acc\n0.5\n", "step,val/acc\nx,y\n", "step\n1,2,3\n", "step,val/acc\n1\n",
    "step,val/acc\nnan,1\n", "step,val/acc\ninf,1\n", "step,val/acc\n-3,1\n", "val/acc,step\n1\n",
    "step,step\n1,2\n", "\n\n", "\0\n", "step,val/acc\n1,nan\n2,inf\n3,-inf\n", "step,val/acc\n1,1e308\n2,-1e308\n", "step,val/acc\n1,1" + "0" * 200_000 + "\n",
    "what,name,digest\na,b,c\n", "step,what,name,digest\n1.0,gradient of rank 0,w,bb\n",
    "step,val/acc\n1,5e-324\n2,1e-323\n", "step,val/acc\n1,9007199254740992\n2,9007199254740994\n", "step,val/acc\n9007199254740992,1\n9007199254740991,2\n",
    "step,model\n1,2\n", "step,\x1b]0;t\x07\n1,2\n2,3\n", "step,<b>\n1,2\n2,3\n", '"step\n', "step,status\n1,2\n2,2\n", "step,val/acc\n1,0_1\n",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(name, text, id=f"{name} {text[:40]!a}", marks=[] if "1.0" in text else pytest.mark.slow)
        for text in TABLES
        for name in ("metrics.csv", *(["digests.csv"] if "what,name,digest" in text else []))
    ],
)
def test_a_table_with_other_columns_and_cells(name, text, run, monkeypatch, capfd):
    (run / name).write_text(text)
    read_everywhere(monkeypatch)
    assert "\x1b]" not in "".join(capfd.readouterr())


def test_the_rows_of_digests_are_read_once_where_a_run_continues(run, monkeypatch):
    (run / "digests.csv").write_text("step,what,name,digest\n1,loss,,a\n2,loss,,b\n")
    read, opened = files.read_text, Counter[str]()
    monkeypatch.setattr(files, "read_text", lambda path, *most: opened.update([path.name]) or read(path, *most))
    folder = RunFolder(run)
    folder.metrics()
    folder.truncate_logs(1)
    assert opened["digests.csv"] == 1
    assert (run / "digests.csv").read_text().split() == ["step,what,name,digest", "1,loss,,a"]
    (run / "digests.csv").write_text("step,what,name,digest\nx,loss,,a\n")
    before = (run / "metrics.csv").read_bytes()
    with pytest.raises(UserError, match=r"digests\.csv is damaged"):
        folder.truncate_logs(0)
    assert (run / "metrics.csv").read_bytes() == before


@pytest.mark.parametrize(("step", "kept"), [("1.0", "1"), ("1e0", "1"), ("", "0"), ("nan", None), ("x", None)])  # fmt: skip
def test_a_step_is_a_whole_number_and_one_that_is_blank_that_of_the_row_before(step, kept, run):
    (run / "metrics.csv").write_text(f"step,val/acc\n{step},0.5\n,0.9\n2,1\n")
    folder = RunFolder(run)
    if kept is None:
        for use in (folder.metrics, lambda: folder.truncate_logs(1), folder.metrics_log.rows):
            with pytest.raises(UserError, match=r"metrics\.csv is damaged"):
                use()
    else:
        folder.truncate_logs(1)
        assert [row["step"] for row in folder.metrics_log.rows()] == [kept, kept]
