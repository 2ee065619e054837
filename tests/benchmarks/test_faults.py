"""benchmarks/faults.py: which processes get a fault."""

import random
import subprocess
import sys
from unittest.mock import Mock

import faults
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def test_a_command_without_its_processes_is_not_stopped(tmp_path, monkeypatch):
    """It may be all that is left of a run that is done."""
    run = faults.Run(tmp_path, "fsdp", [], random.Random(0))
    command = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, start_new_session=True)
    run.commands, run.groups, run.draw = (
        [command],
        [command.pid],
        Mock(**{"random.return_value": 0.25, "uniform.return_value": 0.0}),
    )
    run.draw.choice = lambda options: options[0]
    faults.stop_for_good(run)
    assert run.stopped == []
    monkeypatch.setattr(run, "wait", lambda true, _: true() or command.communicate(b"\n", 60))
    whole = faults.Reference(tmp_path, 0.0, 0.0)
    assert faults.inject(run, faults.FAULTS["kill -STOP for good"], whole) is None
    assert command.returncode == 0
