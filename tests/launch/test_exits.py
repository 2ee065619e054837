"""What a command says to errors that are neither the user's bugs nor its own refusals: a lost process, a full disk, the environment."""

import logging
import signal
import sys
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from lockstep.errors import FolderRemoved, Interrupted, UserError
from lockstep.launch import exits, local
from lockstep.launch.exits import exit_code
from lockstep.machine import files, process
from lockstep.machine.files import atomic_replace
from lockstep.reporting.console import LogFile
from lockstep.reporting.loggers import MetricsCsv
from lockstep.run import CsvLog

LOST = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.77.0.2]:24577",
    "NCCL communicator was aborted on rank 1.",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 15000ms for recv operation",
    "Application timeout caused pair closure",
]


def test_a_lost_process_is_told_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(process, "store", "of several processes")
    for error in LOST:
        assert exit_code(Mock(side_effect=RuntimeError(f"{error}\nmore")), rank=3) == 1
        told = capsys.readouterr().err
        assert told.startswith(f"error: [rank 3] the connection to another process is lost: {error}")
        assert told.count("\n") == 1


@pytest.mark.parametrize("code", [None, 143])
def test_an_exit_after_sigterm_is_not_silent(code, monkeypatch, capsys):
    """Lightning's own handler raises SystemExit: with code 0 in 2.6.6, with 143 in later ones."""
    monkeypatch.setattr(process, "received", [signal.SIGTERM])
    assert exit_code(lambda: local.run_in_this_process(Mock(side_effect=SystemExit(code)), Mock())) == 1
    assert capsys.readouterr().err == "error: ended by SIGTERM; rerun the command.\n"


def test_a_run_that_calls_sys_exit_is_not_done(capsys):
    """Its exit code was 0."""
    for given, code in ((None, 1), (0, 1), (3, 3)):
        try:
            ended = exit_code(lambda given=given: local.run_in_this_process(lambda *_: sys.exit(given), Mock()))
        except SystemExit as e:
            ended = e.code
        assert ended == code
    assert capsys.readouterr().err.count("RuntimeError: sys.exit was called before the run was done") == 2


def test_a_run_whose_folder_was_removed_is_told_so(tmp_path):
    (tmp_path / "a").mkdir()
    log = CsvLog(tmp_path / "a/metrics.csv")
    log.append({"step": 1})
    (tmp_path / "a").rename(tmp_path / "moved")
    with pytest.raises(FolderRemoved, match=f"{tmp_path}/a was removed during the run"):
        log.append({"step": 2})


def test_a_ctrl_c_that_the_launcher_forwards_late_does_not_hide_how_the_run_ended(capsys, monkeypatch):
    """The terminal's Ctrl-C ends the training, and Lightning restores the handlers before the forwarded one arrives."""

    def run() -> None:
        process.install(interrupt=process.on_signal)  # as callbacks/stopping.py does in training
        signal.raise_signal(signal.SIGINT)
        signal.signal(signal.SIGINT, process.end_once)
        try:
            raise Interrupted("ended by SIGINT after 3 steps.")
        finally:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(process, "received", [])
    with process.recording_signals(interrupt=process.end_once):
        assert exit_code(run) == 130
    assert capsys.readouterr().err == "error: ended by SIGINT after 3 steps.\n"


def row(folder: Path) -> None:
    logger = MetricsCsv(folder)
    logger.log_metrics({"loss": 1.0}, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "open_plain", Mock(side_effect=lambda *_, **__: Path("/dev/full").open("a")))
        logger.log_metrics({"loss": 1.0}, 1)


def whole_file(folder: Path) -> None:
    with atomic_replace(folder / "metrics.csv"):
        Path("/dev/full").write_text("text")


@pytest.mark.parametrize("write", [row, whole_file])
def test_a_full_disk_is_told_without_a_traceback(write, tmp_path, capsys):
    assert exit_code(lambda: write(tmp_path)) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: a file could not be written: No space left on device.")
    assert told.count("\n") == 1


def test_a_log_on_a_full_disk_is_silent(capsys):
    full, fine = (LogFile(Path("/dev", name).open("a", buffering=1)) for name in ("full", "null"))
    full.handle(logging.makeLogRecord({"msg": "text"}))
    with suppress(OSError):
        full.stream.close()
    assert not capsys.readouterr().err
    fine.handle(logging.makeLogRecord({"msg": "%d", "args": ("a user's mistake",)}))
    fine.stream.close()
    assert "a user's mistake" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "environment", "waits"), [(0, "job", False), (1, "job", True), (1, "", False)])
def test_under_torchrun_rank_0_says_what_is_wrong_before_another_process_ends_all(
    rank, environment, waits, monkeypatch, capsys
):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if environment:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", environment)
    monkeypatch.setattr(exits.time, "sleep", sleep := Mock())
    assert exit_code(Mock(side_effect=UserError("loader.batch_size=63")), rank=rank) == 2
    assert sleep.called == waits
    assert ("loader.batch_size=63" in capsys.readouterr().err) == (rank == 0)
