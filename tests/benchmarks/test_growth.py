"""How benchmarks/growth.py measures: memory of processes against what they are known to hold, and the order of samples."""

import mmap
import subprocess
import sys

import growth
import measuring
import psutil
import pytest

HOLD = """
import mmap, sys
own = bytearray(int(sys.argv[2]))
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    total = sum(mapped[i] for i in range(0, len(mapped), mmap.PAGESIZE))
print(total, flush=True)
sys.stdin.read()
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@linux
def test_shared_pages_count_once_and_own_ones_for_each(tmp_path):
    size, own, count = 1024 * mmap.PAGESIZE, 16 * 2**20, 3
    (tmp_path / "data.npy").write_bytes(bytes(size))
    command = [sys.executable, "-c", HOLD, str(tmp_path / "data.npy"), str(own)]
    holders = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for holder in holders:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"0\n"
        processes = [psutil.Process(holder.pid) for holder in holders]
        each = [growth.memory_of(process, tmp_path) for process in processes]
        together = growth.total(each)
    finally:
        for holder in holders:
            holder.communicate()
    assert [one.mapped for one in each] == [size] * count
    assert abs(together.mapped_pss - size) < count * 2**16  # smaps rounds to KiB
    assert all(own < one.own < own + 2**24 for one in each)
    assert growth.memory_of(processes[0], tmp_path) == growth.Memory()  # it has ended


def test_the_order_of_samples_is_measured_at_any_place():
    batches = growth.train_batches(10**8, 16, 1024)
    assert growth.first_s(batches, len(batches) - 1) > 0
    assert (growth.duration(2.5e-5), growth.duration(1.5), growth.size(3.2e9)) == ("25 us", "1.5 s", "3.2 GB")


@linux
def test_a_permutation_of_all_samples_shows_in_the_memory():
    count = 2**22 + 1  # 32 MiB of int64: below, malloc reuses what earlier tests freed
    assert growth.torch_sampler(count, 4)[1] > 8 * count
    batches = growth.train_batches(count, 4, 64)
    assert growth.grown_bytes(lambda: growth.pass_through(batches)) < 8 * count


def test_a_section_is_drawn(tmp_path):
    lines = {"ddp": [(1, 2.0), (2, 2.0)], "fsdp, in theory": [(1, 2.0), (2, 1.0)]}
    growth.plot(growth.Section("Memory", "", {"GiB": lines}), tmp_path / "plot.png")
    growth.plot(growth.Section("Order", "", {"s": lines, "bytes": lines}, x="samples", log=True), tmp_path / "two.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("plot.png", "two.png"))


@linux
def test_what_a_process_holds_is_seen(tmp_path):
    code = "import sys, threading; files = [open(sys.argv[1]) for _ in range(9)]; threading.Thread(target=sys.stdin.read).start(); print(1, flush=True)"
    (tmp_path / "a").touch()
    metrics = tmp_path / "metrics.csv"
    assert measuring.last_step(metrics) == 0
    metrics.write_text("step,train/loss\n19,1.0\n39,")
    assert measuring.last_step(metrics) == 39
    command = [sys.executable, "-c", code, str(tmp_path / "a")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        child = psutil.Process(process.pid)
        assert child in growth.descendants()
        looks = [growth.held(child, step) for step in (10, 90)]
        process.stdin.close()
    assert looks[0][1][1:] == (3 + 9, 2)
    rows = growth.held_rows({"a": [(10, (9.0, 0.0, 0.0)), (80, (5.0, 0.0, 0.0))]}, 100)
    assert rows[0] == ["a", "memory, MiB", "9", "5", "5"]
