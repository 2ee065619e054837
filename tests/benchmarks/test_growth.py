"""How benchmarks/growth.py measures: memory of processes against what they are known to hold, the order of samples, predictions."""

import mmap
import subprocess
import sys

import growth
import measuring
import psutil
import pytest

from lockstep import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
# Maps a file, holds as many bytes of its own as it is told, nine open files and a thread.
HOLD = """
import mmap, sys, threading
own = bytearray(int(sys.argv[2]))
files = [open(sys.argv[1]) for _ in range(9)]
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
total = sum(mapped[i] for i in range(0, len(mapped), mmap.PAGESIZE))
threading.Thread(target=sys.stdin.read).start()
print(total, flush=True)
"""


def test_shared_pages_count_once_and_what_a_process_holds_is_seen(tmp_path):
    size, own, count = 1024 * mmap.PAGESIZE, 16 * 2**20, 3
    (tmp_path / "data.npy").write_bytes(bytes(size))
    command = [sys.executable, "-c", HOLD, str(tmp_path / "data.npy"), str(own)]
    holders = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for holder in holders:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"0\n"
        processes = [psutil.Process(holder.pid) for holder in holders]
        assert set(processes) <= set(growth.descendants())
        each = [growth.memory_of(process, tmp_path) for process in processes]
        step, (_, files, threads) = growth.held(processes[0], 10)
    finally:
        for holder in holders:
            holder.communicate()
    assert abs(sum(one[growth.MAPPED] for one in each) - size) < count * 2**16  # smaps rounds to KiB
    assert all(own < one[growth.OWN] < own + 2**24 for one in each)
    assert (step, files, threads) == (10, 3 + 9 + 1, 2)  # mmap keeps a descriptor of its own
    assert not growth.memory_of(processes[0], tmp_path).any()  # it has ended


@pytest.mark.slow
def test_a_permutation_of_all_samples_shows_in_the_memory():
    count = 2**22 + 1  # 32 MiB of int64: below, malloc reuses what earlier tests freed
    assert growth.torch_sampler(count, 4)[1] > 8 * count
    order = growth.ordered(count, 4, 64)
    assert growth.grown_bytes(lambda: growth.pass_through(order)) < 8 * count
    assert growth.first_s(order, len(order[0]) - 1) > 0


def test_a_long_run_is_shown_at_its_begin_middle_and_end(tmp_path):
    metrics = tmp_path / "metrics.csv"
    assert measuring.last_step(metrics) == 0
    metrics.write_text("step,train/loss\n19,1.0\n39,")
    assert measuring.last_step(metrics) == 39
    rows = growth.held_rows({"a": [(10, (9.0, 0.0, 0.0)), (80, (5.0, 0.0, 0.0))]}, 100)
    assert rows[0] == ["a", "memory, MiB", "9", "5", "5"]


@pytest.mark.slow
def test_the_memory_of_a_prediction_grows_only_by_the_list_of_paths():
    command = [sys.executable, str(ROOT / "benchmarks/growth.py"), "--only", "predict", "--files", "100000,200000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("| 1", "| 2"))]
    first, second = (float(line.split("|")[2].replace(",", "")) for line in lines)
    path_bytes = len(growth.PATH.format(0)) + 49 + 8  # a text of Python's and its place in a list
    assert second - first < 6 * 100_000 * path_bytes / 2**20  # a dict for each row would take as much again
