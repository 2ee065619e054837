"""Who is named when no process gets on; tests/test_hangs.py has whole runs."""

import itertools
import json
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from lockstep.callbacks import hang_detector
from lockstep.callbacks.hang_detector import SILENT, Monitor, hanging_ranks, lines_of
from lockstep.config.checks import resolve
from lockstep.config.settings import Settings
from lockstep.machine import process
from lockstep.machine.world import World
from lockstep.reporting.recorder import Recorder


def sign(*place: int, waits: bool = False, quiet_s: float = 100.0, where: str = "in data.py:7 (load)") -> list:
    return [*place, waits, quiet_s, where]


@pytest.mark.parametrize(("signs", "found"), [
    ([sign(5, 1), sign(5, 0)], [1]),
    ([sign(5, 0, waits=True), sign(5, 0)], [1]),
    ([sign(5, 9), sign(6, 0), sign(6, 0)], [0]),
    ([SILENT, sign(5, 0), SILENT], [0, 2]),
    ([SILENT], [0]),  # the others have finished
    ([sign(5, 0), sign(5, 0)], []),  # all compile, or wait for each other
    ([sign(5, 1), sign(5, 0, quiet_s=3)], []),  # slow, but it gets on
    ([], []),
])  # fmt: skip
def test_the_one_that_the_others_wait_for_is_named(signs, found):
    assert hanging_ranks(dict(enumerate(signs)), 50.0) == found


def test_where_a_thread_is_and_that_it_waits_in_backward_and_in_collectives():
    seen, x = [], torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(lines_of(sys._getframe(1))[0]))
    x.sum().backward()
    for path in (seen[0], torch.distributed.distributed_c10d.__file__):
        assert any(part in path for part in hang_detector.WAITING)
    assert lines_of(sys._getframe())[0].startswith(__file__)


@pytest.fixture
def monitor(tmp_path, monkeypatch):
    """Of rank 0 of 2."""
    monkeypatch.setattr(process, "store", SimpleNamespace(clone=HashStore))
    return Monitor(SimpleNamespace(global_rank=0, world_size=2, default_root_dir=tmp_path), 60.0)


@pytest.fixture
def ended(monitor, monkeypatch):
    """What the monitor says; its process goes on."""
    found = []
    monitor.over.set()
    monkeypatch.setattr(Monitor, "end", lambda _, message: found.append(message))
    return found


@pytest.mark.parametrize(("lines", "waits", "quiet_s"), [
    (["/torch/autograd/graph.py:9 (run)"] * 4, True, 7.5),
    (["/mine/data.py:9 (load)"] * 3 + ["/torch/autograd/graph.py:9 (run)"], True, 0),  # work is no waiting
    (["/mine/data.py:9 (load)"] * 4, False, 7.5),
])  # fmt: skip
def test_how_long_a_process_has_been_quiet(lines, waits, quiet_s, monitor, monkeypatch):
    clock = itertools.count(1000.0, 2.5)
    monkeypatch.setattr(hang_detector, "lines_of", lambda _: [lines.pop(0)])
    monkeypatch.setattr(monitor.over, "wait", lambda _: not lines)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))  # once in each turn
    monkeypatch.setattr(hang_detector.threading, "Timer", lambda *_: SimpleNamespace(start=list, cancel=list))
    monitor.run()
    assert json.loads(monitor.store.get(f"{monitor.key}/0"))[2:4] == [waits, quiet_s]


def test_one_that_does_not_answer_is_named_when_its_last_beat_is_old(monitor, ended, tmp_path):
    seen = {}
    monitor.store.set(f"{monitor.key}/1", json.dumps(sign(4, 0, quiet_s=0.0)))
    for now_s in (100, 103, 105.9, 106.1):
        assert not ended
        monitor.compare(sign(5, 1, quiet_s=now_s), seen, now_s)
    (message,) = ended
    assert message.startswith("rank 1 of 2 hung (no response; the process may be stopped) while the other ranks waited")
    assert "strategy.timeout_s=60" in message and str(tmp_path / "logs") in message


def test_one_that_answers_and_gets_on_is_waited_for(monitor, ended):
    seen = {}
    for beat in range(20):
        monitor.store.set(f"{monitor.key}/1", json.dumps(sign(5, 0, quiet_s=44.0 + beat / 20)))
        monitor.compare(sign(5, 1, waits=True, quiet_s=50.0 + beat), seen, 100 + beat)
    assert not ended
    monitor.store.set(f"{monitor.key}/1", json.dumps(sign(5, 0, quiet_s=46.0, where="in mine.py:1 (f)")))
    monitor.compare(sign(5, 1, waits=True, quiet_s=80.0), seen, 120)
    assert ended[0].startswith("rank 1 of 2 hung (in mine.py:1 (f))")


@pytest.mark.parametrize(("trains", "status"), [(True, "failed"), (False, "running")])
def test_an_evaluation_that_hangs_leaves_the_status_of_its_run(trains, status, monitor, tmp_path, monkeypatch, capsys):
    codes: list[int] = []
    monkeypatch.setattr(hang_detector.os, "_exit", codes.append)
    monitor.folder.write_report({"status": "running"})
    cfg, world = resolve(["run=b", f"runs_dir={tmp_path}"]), World("cpu", 2, 1, "ddp", rank=1)
    with Recorder(Settings(cfg, world)) if trains else nullcontext():
        monitor.end("rank 1 of 2 hung")
    assert (codes, monitor.folder.report()["status"]) == ([1], status)
    assert capsys.readouterr().err == "error: rank 1 of 2 hung\n"
    assert not process.trains
