"""Who is named when no process gets on; tests/test_hangs.py has whole runs."""

import itertools
import sys
import time
from contextlib import nullcontext

import pytest
import torch
from torch.distributed import HashStore

from lockstep.callbacks import hang_detector
from lockstep.callbacks.hang_detector import Heartbeat, Monitor, hanging_ranks, where
from lockstep.config.checks import resolve
from lockstep.config.settings import Settings
from lockstep.machine import process
from lockstep.machine.world import World
from lockstep.reporting.recorder import Recorder
from lockstep.run import RunFolder


def sign(*place: int, waits: bool = False, quiet_s: float = 100.0) -> Heartbeat:
    return Heartbeat(1, place, waits, quiet_s, "data.py:7 (load)")


@pytest.mark.parametrize(("signs", "silent", "found"), [
    ([sign(5, 1), sign(5, 0)], [], [1]),
    ([sign(5, 0, waits=True), sign(5, 0)], [], [1]),
    ([sign(5, 9), sign(6, 0), sign(6, 0)], [], [0]),
    ([sign(5, 1), sign(5, 0), sign(5, 0)], [0, 2], [0, 2]),
    ([sign(5, 0), sign(5, 0)], [], []),  # all compile, or wait for each other
    ([sign(5, 1), sign(5, 0, quiet_s=3)], [], []),  # slow, but it gets on
])  # fmt: skip
def test_the_one_that_the_others_wait_for_is_named(signs, silent, found):
    assert hanging_ranks(dict(enumerate(signs)), silent, 50.0) == found


def test_where_a_thread_is_and_that_it_waits_in_backward_and_in_collectives():
    seen, x = [], torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(where(sys._getframe(1))[0]))
    x.sum().backward()
    for path in (seen[0], torch.distributed.distributed_c10d.__file__):
        assert any(part in path for part in hang_detector.WAITING)
    innermost, of_ours = where(sys._getframe())
    assert innermost == of_ours and innermost.startswith(__file__)
    assert where(None) == ("an unknown location", "an unknown location")


@pytest.fixture
def monitor(tmp_path):
    """Of rank 0 of 2."""
    made = Monitor(HashStore(), "watch/1", 0, 2, 60.0, RunFolder(tmp_path))
    made.heartbeat, made.answered_s = sign(5, 1, quiet_s=50.0), 10_000.0
    return made


@pytest.fixture
def ended(monkeypatch):
    """What the monitor says; its process goes on."""
    found = []
    monkeypatch.setattr(Monitor, "end", lambda _, message, *, reports: found.append((message, reports)))
    return found


@pytest.mark.parametrize(("lines", "waits", "quiet_s"), [
    (["/torch/autograd/graph.py:9 (run)"] * 4, True, 7.5),
    (["/mine/data.py:9 (load)"] * 3 + ["/torch/autograd/graph.py:9 (run)"], True, 0),  # work is no waiting
    (["/mine/data.py:9 (load)"] * 4, False, 10),
])  # fmt: skip
def test_how_long_a_process_has_been_quiet(lines, waits, quiet_s, monitor, monkeypatch):
    clock = itertools.count(1000.0, 2.5)
    monkeypatch.setattr(hang_detector, "where", lambda _: (lines.pop(0), ""))
    monkeypatch.setattr(monitor.over, "wait", lambda _: not lines)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))  # once before the loop and once in each turn
    monitor.decide()
    assert (monitor.heartbeat.waits, monitor.heartbeat.quiet_s) == (waits, quiet_s)


def test_one_that_does_not_answer_is_named_when_its_last_beat_is_old(monitor, ended):
    seen = {}
    monitor.answers = {1: sign(4, 0, quiet_s=0.0)}
    for now_s in (100, 103, 105.9):
        monitor.look_for_hanging(seen, now_s)
    assert not ended
    monitor.look_for_hanging(seen, 106.1)
    ((message, reports),) = ended[-1:]
    assert reports
    assert message.startswith("rank 1 of 2 hung (no response; the process may be stopped) while the other ranks waited")
    assert "strategy.timeout_s=60" in message and str(monitor.stacks.parent) in message


def test_one_that_answers_and_gets_on_is_waited_for(monitor, ended):
    seen = {}
    for beat in range(20):
        monitor.heartbeat = Heartbeat(beat, (5, 1), True, 50.0, "")
        monitor.answers = {1: Heartbeat(beat, (5, 0), False, 44.0, "")}
        monitor.look_for_hanging(seen, 100 + beat)
    assert not ended
    monitor.answers = {1: Heartbeat(beat, (5, 0), False, 46.0, "mine.py:1 (f)")}
    monitor.look_for_hanging(seen, 101 + beat)
    assert ended[0][0].startswith("rank 1 of 2 hung (in mine.py:1 (f))")


@pytest.mark.parametrize(("trains", "status"), [(True, "failed"), (False, "running")])
def test_an_evaluation_that_hangs_leaves_the_status_of_its_run(trains, status, monitor, tmp_path, monkeypatch, capsys):
    codes: list[int] = []
    monkeypatch.setattr(hang_detector.os, "_exit", codes.append)
    monitor.folder.write_report({"status": "running"})
    cfg, world = resolve(["run=b", f"runs_dir={tmp_path}"]), World("cpu", 2, 1, "ddp", rank=1)
    with Recorder(Settings(cfg, world)) if trains else nullcontext():
        monitor.end("rank 1 of 2 hung", reports=True)
    assert (codes, monitor.folder.report()["status"]) == ([1], status)
    assert capsys.readouterr().err == "error: rank 1 of 2 hung\n"
    assert not process.trains
