"""Lockstep's promises as a check for a project's tests: that of `lockstep check`."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def assert_promises(overrides: Sequence[str] = (), *, steps: int = 5) -> dict[str, Any]:
    """Runs the first steps of a training command in each way, as `lockstep check` does. Returns what that prints with --json.

    Raises:
        AssertionError: two ways differ, or one failed. Names where they part.
    """
    # a process of its own, because the ways are forked
    command = [sys.executable, "-m", "lockstep", "check", "--json", f"steps={steps}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    bad = {way["way"]: way["note"] for way in found["ways"] if way["verdict"] in ("differs", "failed")}
    assert not bad, f"not the same in: {bad}"
    return found
