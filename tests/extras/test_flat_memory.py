"""Memory does not grow with the number of inputs, except by the list of their paths."""

import subprocess
import sys

import growth
import pytest

from lockstep import ROOT


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_memory_grows_only_by_the_list_of_paths():
    command = [sys.executable, str(ROOT / "benchmarks/growth.py"), "--only", "predict", "--files", "100000,200000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    first, second = (
        float(line.split("|")[2].replace(",", ""))
        for line in done.stdout.splitlines()
        if line.startswith("| 1") or line.startswith("| 2")
    )
    path_bytes = len(growth.PATH.format(0)) + 49 + 8  # a text of Python's and its place in a list
    assert second - first < 3 * 100_000 * path_bytes / 2**20
