"""Time and memory of the order of samples, for any number of them and of processes: the part of growth.py that starts no process.

One process plays a rank in the middle. torch's DistributedSampler draws a permutation of all samples in each process at each
epoch; it is measured as far as it fits and extrapolated from there.
"""

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.data.sampler import BLOCK, Split, TrainBatches

SIZES = (10**5, 10**6, 10**7, 10**8, 10**9)
MEASURED = 10**7  # samples up to which DistributedSampler is measured: 10^9 would take some 50 GB
SETUPS = {
    "1 process, batch 256": (1, 256),
    "4,096 processes, batch 65,536": (4096, 65_536),
    "4,096 processes, 1 sample each": (4096, 4096),
}
REPEAT = 5


def ours(samples: int, world: int, batch: int) -> TrainBatches:
    """For a rank in the middle, with a validation split of a tenth."""
    return TrainBatches(
        Split(samples, samples // 10, samples - samples // 10), batch=batch, seed=0, rank=world // 2, world=world
    )


def resident_bytes(name: str) -> int:
    """VmRSS, or VmHWM, the most since the last reset, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def grown_bytes(call: Callable[[], Any]) -> int:
    """How far this process grew at most during `call`, by the system's account."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident_bytes("VmRSS")
    kept = call()
    peak = resident_bytes("VmHWM")
    del kept
    return max(0, peak - before)


def first_s(batches: TrainBatches, micro_batch: int) -> float:
    """Seconds to the first batch after `micro_batch`, median."""
    seconds = []
    for epoch in range(REPEAT):
        batches.epoch, batches.start = epoch, micro_batch
        began_s = time.perf_counter()
        next(iter(batches))
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def each_s(batches: TrainBatches, at_most_s: float = 1.0) -> float:
    """Seconds per batch, from the beginning of an epoch, where blocks of indices are computed ahead."""
    batches.epoch = batches.start = 0
    began_s, count = time.perf_counter(), 0
    for _ in batches:
        count += 1
        if time.perf_counter() - began_s > at_most_s:
            break
    return (time.perf_counter() - began_s) / count


def pass_through(batches: TrainBatches) -> None:
    """The first batches of an epoch, until blocks of indices have their full size."""
    batches.epoch = batches.start = 0
    share = batches.batch // (batches.world * batches.accumulate)
    for _ in islice(batches, 3 * BLOCK // share):
        pass


def traced_bytes(batches: TrainBatches) -> int:
    """The most that Python and numpy held meanwhile."""
    tracemalloc.start()
    pass_through(batches)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def torch_sampler(samples: int, world: int) -> tuple[float, int]:
    """Seconds to the first index of DistributedSampler, and bytes."""
    from torch.utils.data import DistributedSampler

    class Sized:
        def __len__(self) -> int:
            return samples

    other: Any = DistributedSampler(Sized(), num_replicas=world, rank=world // 2, shuffle=True)  # type: ignore[arg-type]

    def begin() -> Iterator[int]:
        indices: Iterator[int] = iter(other)
        next(indices)
        return indices

    begin() if samples <= 10**6 else None  # warm
    began_s = time.perf_counter()
    begin()
    elapsed_s = time.perf_counter() - began_s
    return elapsed_s, grown_bytes(begin)


def quantity(value: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} {units[-1]}"


def duration(seconds: float) -> str:
    return quantity(1e6 * seconds, ("us", "ms", "s"))


def size(n_bytes: float) -> str:
    return quantity(n_bytes / 1000, ("kB", "MB", "GB"))


def rows_and_lines() -> tuple[list[list[str]], dict[str, dict[str, list[tuple[float, float]]]]]:
    rows: list[list[str]] = []
    time_of: dict[str, list[tuple[float, float]]] = {}
    bytes_of: dict[str, list[tuple[float, float]]] = {}
    for name, (world, batch) in SETUPS.items():
        for samples in SIZES:
            batches = ours(samples, world, batch)
            if len(batches) < 2:
                continue
            begin, middle, last = (first_s(batches, place) for place in (0, len(batches) // 2, len(batches) - 1))
            held = grown_bytes(partial(pass_through, batches))
            peak = traced_bytes(batches)
            cells = [duration(s) for s in (begin, middle, last, each_s(batches))]
            rows.append([name, f"{samples:.0e}", *cells, size(peak), size(held)])
            time_of.setdefault(name, []).append((samples, begin))
            bytes_of.setdefault(name, []).append((samples, peak))
    return rows, {"s to the first batch": time_of, "bytes": bytes_of}


def sampler() -> tuple[str, dict[str, Any]]:
    """A text with its tables, and the lines of its plots."""
    rows, plots = rows_and_lines()
    seconds, n_bytes = 0.0, 0
    for samples in SIZES:
        label = "DistributedSampler"
        if samples <= MEASURED:
            seconds, n_bytes = torch_sampler(samples, 4096)
            rows.append([label, f"{samples:.0e}", duration(seconds), "the same", "the same", "", "", size(n_bytes)])
        else:
            factor = samples / MEASURED
            label += ", extrapolated"
            cells = [duration(seconds * factor), "the same", "the same", "", "", size(n_bytes * factor)]
            rows.append([label, f"{samples:.0e}", *cells])
        factor = max(1.0, samples / MEASURED)
        for name, value in (("s to the first batch", seconds), ("bytes", n_bytes)):
            plots[name].setdefault("DistributedSampler (above 1e7 in theory)", []).append((samples, value * factor))
    head = [
        "sampler", "samples", "first batch of an epoch", "resumed in the middle", "resumed at the last", "each batch", "peak (tracemalloc)",
        "process grew by (VmHWM)",
    ]  # fmt: skip
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    text = (
        f"One process plays rank n/2; medians of {REPEAT}. `TrainBatches` computes where a bijection sends the samples of the steps ahead, so "
        f"neither time nor memory depends on their number, beyond blocks of {BLOCK:,}, nor on the step at which a run is resumed. DistributedSampler (4,096 replicas) "
        f"draws a permutation of all and makes a list of it; measured to {MEASURED:.0e}, above that multiplied."
    )
    return text + "\n\n" + "\n".join(lines), plots
