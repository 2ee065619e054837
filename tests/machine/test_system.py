"""What differs between systems is in one module, so a run on Windows can be tried here."""

import os
import subprocess
import sys

import pytest

from lockstep import ROOT

AS_WINDOWS = {"PYTHONPATH": str(ROOT / "tests/as_windows")}


def test_nothing_that_only_unix_has_is_needed_before_training(tmp_path):
    lines = (
        "from lockstep.machine import system, world",
        "print(system.WINDOWS, system.REQUEUE, system.resident_peak_bytes(), world.accelerator_of('auto'))",
        "from lockstep.machine.files import is_held, locked",
        "from pathlib import Path",
        "with locked(Path('lock')): print(is_held(Path('lock')))",
        "Path('lock').touch(); print(is_held(Path('lock')))",
    )
    env = {**os.environ, **AS_WINDOWS}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["True () None cpu", "True", "False"], done.stderr


@pytest.mark.full
def test_what_ci_runs_on_other_systems_passes_without_what_only_unix_has():
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TEST_"))} | AS_WINDOWS
    done = subprocess.run(["bash", ".ci/platform"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
