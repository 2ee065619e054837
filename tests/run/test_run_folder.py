"""The folder of a run: one process at a time, files that somebody damaged, and what is a run."""

import fcntl
import json
import math
import os
import signal
import socket
import subprocess
import sys
from unittest.mock import Mock

import filelock
import pytest

from lockstep.errors import FolderRemoved, RunFailed, UserError
from lockstep.run import CsvLog, RunFolder, find_run, run_folders, validation_metrics_at

HOLDER = """
import os, sys
from lockstep.run import RunFolder
with RunFolder(sys.argv[1]).locked():
    if os.fork() == 0:
        print("held", flush=True)  # by the fork, which has given up its copy by now
    sys.stdin.read()  # in both: the fork, like a worker of a dataloader, may outlive its parent
"""


def test_a_lock_lives_as_long_as_its_process_and_not_as_its_forks(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "a")
    assert not folder.is_locked()
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder.path)], stdin=-1, stdout=-1) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert folder.is_locked()
        folder.write_report({"status": "running", "host": socket.gethostname()})
        assert folder.report()["status"] == "running"
        os.link(folder.lock_file, tmp_path / "backup")  # as cp -al does
        with pytest.raises(UserError, match="another process is training there"), folder.locked(0):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(60)
        assert not folder.is_locked()
        holder.stdin.close()  # only now the fork ends
    assert folder.report()["status"] == "died"
    folder.record_end(RunFailed("its process ended with exit code -9"))
    assert folder.report()["status"] == "failed"
    folder.write_report({"status": "running", "host": "another"})
    assert folder.report()["status"] == "running"
    with folder.locked():
        assert folder.is_locked(), "in the same process too"
        assert not folder.lock_file.samefile(tmp_path / "backup")
    assert not folder.is_locked()
    assert [file.name for file in folder.path.iterdir()] == ["report.json"]


def test_a_lock_is_taken_again_if_its_last_holder_removed_the_file_meanwhile(tmp_path, monkeypatch):
    folder, taken, acquire = RunFolder(tmp_path / "a"), [], filelock.FileLock.acquire

    def late(self, *args, **options):
        proxy = acquire(self, *args, **options)
        if not taken:
            folder.lock_file.unlink()
        taken.append(self)
        return proxy

    monkeypatch.setattr(filelock.FileLock, "acquire", late)
    with folder.locked():
        assert folder.is_locked()
    assert len(taken) == 2


def test_the_lock_of_another_user_is_respected(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "a")
    with folder.locked():
        monkeypatch.setattr(
            filelock.FileLock, "_acquire", Mock(side_effect=OSError(13, "Permission denied"))
        )  # root is never refused
        with pytest.raises(UserError, match="another process is training there"), folder.locked(0):
            pass


def test_a_folder_in_which_nothing_was_written_is_removed(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "sweep" / "0")
    with folder.locked():
        assert [file.name for file in folder.path.iterdir()] == [folder.lock_file.name]
    assert list(tmp_path.iterdir()) == []


def test_file_systems_without_locks_work_without(tmp_path, monkeypatch):
    for owner, name in ((filelock.FileLock, "_acquire"), (fcntl, "flock")):
        monkeypatch.setattr(owner, name, Mock(side_effect=OSError(95, "Operation not supported")))
    folder = RunFolder(tmp_path / "a")
    with folder.locked():
        folder.lock_file.touch()
        assert not folder.is_locked()


def test_a_log_that_was_removed_begins_with_its_header_again(tmp_path):
    log = CsvLog(tmp_path / "run" / "metrics.csv")
    log.path.parent.mkdir()
    log.append({"step": 1, "loss": 0.5})
    log.path.unlink()
    log.append({"step": 2, "loss": 0.25})
    assert log.path.read_text().split() == ["step,loss", "2,0.25"]
    log.path.unlink()
    log.path.parent.rmdir()
    with pytest.raises(FolderRemoved, match="run was removed during the run"):
        log.append({"step": 3, "loss": 0.125})


def test_validation_metrics_are_those_of_the_checkpoint():
    rows = [
        {"step": 2, "val/auc": 0.5, "val/count": 9},
        {"step": 4, "val/auc": math.nan},
        {"step": 4, "train/loss": 1.0},
    ]
    assert validation_metrics_at(rows, 2, "val/auc") == validation_metrics_at(rows[:1], 4, None) == {"val/auc": 0.5}
    assert math.isnan(validation_metrics_at(rows, 4, "val/auc")["val/auc"])
    assert validation_metrics_at(rows, 3, "val/auc") == {}


def test_folders_in_the_places_of_files_are_named(tmp_path):
    run = RunFolder(tmp_path)
    for path, read in (
        (run.config_file, run.saved_config),
        (run.report_file, run.report),
        (run.metrics_log.path, run.metrics),
    ):
        path.mkdir()
        with pytest.raises(UserError, match=f"{path} is damaged"):
            read()


def test_the_end_that_a_run_wrote_itself_stays(tmp_path):
    folder = RunFolder(tmp_path)
    for before, error, after in (
        ("running", RunFailed("gone"), "failed"),
        ("running", KeyboardInterrupt(), "interrupted"),
        ("failed", KeyboardInterrupt(), "interrupted"),  # at Ctrl-C one process may fail because another is gone
        ("preempted", KeyboardInterrupt(), "preempted"),
        ("done", RunFailed("gone"), "done"),
        ("running", UserError("wrong"), "running"),
    ):
        folder.write_report({"status": before})
        folder.record_end(error)
        assert json.loads(folder.report_file.read_text())["status"] == after


def test_only_folders_of_runs_are_runs(tmp_path):
    """Not what W&B and an export leave, within a run or beside it."""
    made = ["begun/config.yaml", "begun/checkpoints/last.ckpt", "begun/wandb/run-1/files/config.yaml", "begun/out/config.yaml",
            "logged/config.yaml", "logged/metrics.csv", "sweep/0/config.yaml", "sweep/0/report.json",
            "sweep/1/report.json", "exported/config.yaml", "exported/model.safetensors"]  # fmt: skip
    for name in made:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = sorted(run.path.relative_to(tmp_path).as_posix() for run in run_folders(tmp_path))
    assert found == ["begun", "logged", "sweep/0", "sweep/1"]
    for name, there in (
        ("begum", r".did you mean begun"),
        ("~", r"\. Runs there: begun, logged, sweep/0\.$"),
    ):  # sweep/1 never began
        with pytest.raises(UserError, match=there):
            find_run(name, tmp_path, key="run")
    assert find_run(tmp_path / "begun", "elsewhere").path == find_run("begun", tmp_path).path == tmp_path / "begun"
