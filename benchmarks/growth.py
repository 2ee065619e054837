"""Measures how costs grow with processes, parameters, samples, steps and files. Prints Markdown tables.

python benchmarks/growth.py [--only world,memory,sampler,data,long,predict] [--rounds 3] [--data-root <folder>]

world: images per second. memory: memory per process under ddp and fsdp. sampler: time and memory of the sampling order, up to a billion
samples. data: memory of the images that the processes of a machine share. long: memory, open files and threads over the steps of a long
run. predict: memory of predicting many files. All on the CPU. Rounds alternate, because machines are shared. Needs Linux.
"""

import argparse
import gc
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import measuring
import numpy as np
import psutil
from measuring import CPU, SMALL, in_turns, last_step, ratio, some_of, spread, table
from numpy.typing import NDArray

import lockstep
from lockstep.data.global_batches import GlobalBatches, ShareSpec
from lockstep.data.loaders import Share
from lockstep.data.sampler import BLOCK, ComputedOrder

GIB, MIB = 2**30, 2**20


def places(args: argparse.Namespace) -> list[str]:
    return [f"runs_dir={args.folder}/runs", f"data.cache_dir={args.folder}/cache"]


def train(args: argparse.Namespace, *options: str) -> dict[str, Any]:
    """The report of a run in separate processes, even if it is one process."""
    print("train.py " + " ".join(options), file=sys.stderr)
    source = f"data.root={args.data_root.resolve()}" if args.data_root else "data.source=embedded"
    short = ["trainer.limit_val_batches=0", "trainer.limit_test_batches=1", "trainer.enable_checkpointing=false"]
    return measuring.train([*places(args), *CPU, source, *short, *options])


# --- what processes hold: memory, open files, threads ---


# Bytes of a process. `PSS` counts a page that n processes share as 1/n, so the sum over all processes is their total memory. `OWN`: pages
# that belong to no file, allocated by the process itself. `MAPPED`: the PSS of mapped files in a folder.
PSS, OWN, MAPPED = range(3)
Memory = NDArray[np.int64]


def memory_of(process: psutil.Process, folder: Path | None = None) -> Memory:
    """Zero if the process has ended."""
    try:
        maps = process.memory_maps()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return np.zeros(3, np.int64)
    mapped = (area.pss for area in maps if folder and area.path.startswith(f"{folder}/"))
    return np.array([sum(area.pss for area in maps), sum(area.anonymous for area in maps), sum(mapped)])


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@contextmanager
def repeatedly(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Calls `look` in a thread. It takes at most a tenth of the time, because the kernel walks through all pages of a process."""
    over = threading.Event()

    def loop() -> None:
        pause_s = every_s
        while not over.wait(pause_s):
            began_s = time.perf_counter()
            look()
            pause_s = max(every_s, 10 * (time.perf_counter() - began_s))

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def watched(args: argparse.Namespace, *options: str, folder: Path | None = None) -> tuple[Memory, Memory, int]:
    """Trains; returns the peak memory of any process, that of all processes together, and the number of parameters."""
    largest = total = np.zeros(3, np.int64)

    def look() -> None:
        nonlocal largest, total
        if now := [memory_of(process, folder) for process in psutil.Process().children()]:
            largest, total = np.maximum(largest, np.max(now, 0)), np.maximum(total, np.sum(now, 0))

    with repeatedly(look, every_s=0.1):
        report = train(args, *options)
    return largest, total, report["parameters"]


KINDS = ("memory, MiB", "open files", "threads")
Held = tuple[int, tuple[float, ...]]  # of a process: (steps, values as in KINDS)


def held(process: psutil.Process, step: int) -> Held:
    return step, (memory_of(process)[OWN] / MIB, process.num_fds(), process.num_threads())


def held_during(run: Callable[[], Any], metrics: Path) -> dict[str, list[Held]]:
    """What each process of `run` held at every sample. Omits processes that lived for less than half of the samples."""
    seen: dict[str, list[Held]] = {}

    def look() -> None:
        step = last_step(metrics)
        for process in descendants() if step else ():
            with suppress(psutil.NoSuchProcess):  # it has ended
                seen.setdefault(f"{process.pid} {process.name()}", []).append(held(process, step))

    with repeatedly(look, every_s=2.0):
        run()
    most = max(map(len, seen.values()), default=0)
    return {name: looks for name, looks in seen.items() if len(looks) > most / 2}


POINTS = (0.1, 0.5, 0.99)  # fractions of the steps; not 1, because processes close at the end


def held_rows(processes: dict[str, list[Held]], steps: int) -> list[list[str]]:
    """A row for each process and kind, with the values at POINTS."""
    rows = []
    for name, looks in processes.items():
        points = [min((abs(step - at * steps), values) for step, values in looks)[1] for at in POINTS]
        for kind, values in zip(KINDS, zip(*points, strict=True), strict=True):
            rows.append([name, kind, *(f"{value:,.0f}" for value in values)])
    return rows


# --- world ---

STRONG, WEAK = "global batch 256", "64 per process"


def speed(args: argparse.Namespace, world: int, batch: int, threads: int | None) -> float:
    """Images per second of BasicNet. Each process has `threads` threads, or as many as it has cores."""
    steps = [f"trainer.max_steps={args.steps}", "trainer.log_every_n_steps=10"]
    with patch.dict(os.environ):
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
        report = train(args, "strategy=ddp", f"trainer.devices={world}", f"loader.batch_size={batch}", *steps)
    return float(report["train/images_per_s"])


def world(args: argparse.Namespace) -> str:
    batches = {(kind, n): 256 if kind == STRONG else 64 * n for kind in (STRONG, WEAK) for n in args.worlds}
    ways = {f"{kind} {n}": partial(speed, args, n, batch, threads=1) for (kind, n), batch in batches.items()}
    alone = "one process with all cores"
    rates = in_turns(ways | {alone: partial(speed, args, 1, 256, threads=None)}, args.rounds)
    rows = []
    for (kind, n), batch in batches.items():
        rates_of_one = rates[f"{kind} {n}"]
        speedup = ratio(rates_of_one, rates[f"{kind} {args.worlds[0]}"])
        rows.append([kind, str(n), str(batch), spread(rates_of_one), f"{speedup:.2f}"])
    rows.append([alone, "1", "256", spread(rates[alone]), ""])
    head = ["what", "processes", "batch", "images/s, median (min to max)", "speed-up"]
    return f"BasicNet under ddp, one thread per process, {args.steps} steps.\n\n{table(head, rows)}"


# --- memory ---

# A vision transformer with 1,024 channels and half the depth of ViT-L/16: 4 x 152M x 16 bytes (ddp, AdamW) plus libraries fit into 16 GiB.
VIT = ["model=timm", "model.name=vit_large_patch16_224", "data=mnist"]
SHORT = ["data.image_size=32", "loader.batch_size=8", "loader.eval_batch_size=8", "trainer.max_steps=3", "trainer.precision=32-true"]  # fmt: skip
BYTES = 16  # per parameter under AdamW in fp32: weight, gradient, two moments


def memory(args: argparse.Namespace) -> str:
    """Peak of a process in GiB, sampled several times per second. `own`: pages that belong to no file. The base is a run with BasicNet.
    Under fsdp, each process creates the whole network before it keeps its shard, and gathers one block at a time."""
    rows, count = [], 0
    base = watched(args, "model=basic_net", "strategy=ddp", "trainer.devices=1", *SHORT)[0][OWN]
    for strategy in ("ddp", "fsdp"):
        for n in args.worlds:
            setup = [f"strategy={strategy}", f"trainer.devices={n}"]
            largest, total, count = watched(args, *VIT, *SHORT, f"+model.depth={args.depth}", *setup)
            theory = BYTES * count / (n if strategy == "fsdp" else 1)
            sizes = [theory, largest[OWN] - base, total[PSS]]
            rows.append([strategy, str(n), *(f"{size / GIB:.2f}" for size in sizes)])
    head = ["strategy", "processes", "weights, gradients, AdamW in theory", "own, above the base", "all (PSS)"]
    net = f"vit_large_patch16_224 with {args.depth} of its 24 blocks, {count / 1e6:.0f} million parameters"
    return f"{net}: {4 * count / GIB:.2f} GiB. The base is {base / GIB:.2f} GiB.\n\n{table(head, rows)}"


# --- data ---

# Small images and a small network: it only matters that all data is read.
READING = ["strategy=ddp", "data.image_size=8", "loader.batch_size=512", "trainer.max_epochs=3"]


def data(args: argparse.Namespace) -> str:
    """Peak MiB (PSS) of the decoded files in memory, over all ranks of a real run."""
    rows, cache = [], (args.folder / "cache").resolve()
    name = "cifar10" if args.data_root else "mnist"
    options = [f"data={name}", *READING]
    train(args, *options, "trainer.devices=1", "loader.limit_train=512")  # decodes the data
    size = sum(path.stat().st_size for path in cache.glob(f"{name}-*/**/*.npy"))
    for n in args.worlds:
        _, together, _ = watched(args, *options, f"trainer.devices={n}", folder=cache)
        rows.append([str(n), f"{together[MAPPED] / MIB:.1f}", f"{together[MAPPED] / size:.3f}"])
    head = ["processes", "in memory, MiB", "of all data"]
    text = f"ddp over three epochs of {name}, whose images and labels are {size / MIB:.1f} MiB."
    return f"{text}\n\n{table(head, rows)}"


# --- sampler: one process acts as a rank in the middle ---

SIZES = (10**5, 10**6, 10**7, 10**8, 10**9)
MEASURED = 10**7  # samples up to which DistributedSampler is measured: 10^9 would need about 50 GB
SETUPS = {"1 process, batch 256": (1, 256), "4,096 processes, batch 65,536": (4096, 65_536)}
REPEAT = 5


Ordered = tuple[GlobalBatches, ShareSpec, int]


def ordered(samples: int, world: int, batch: int) -> Ordered:
    """The order of a rank in the middle, with a validation split of 10%."""
    from torch.utils.data import BatchSampler

    order = ComputedOrder(samples - samples // 10)
    batches = GlobalBatches(BatchSampler(order, batch, drop_last=True), compare=False)
    return batches, ShareSpec(rank=world // 2, world=world), batch


def shares(found: Ordered, epoch: int, done: int) -> Iterator[Share]:
    batches, spec, size = found
    return batches.with_keys(spec.shares(batches.batches(0, epoch, done), done, 0, epoch, size), 0, epoch)


def grown_bytes(call: Callable[[], Any]) -> int:
    """How much the memory of this process grew at most during `call`, as reported by the kernel."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    start_bytes = psutil.Process().memory_info().rss
    result = call()
    peak = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    del result
    return max(0, 1024 * peak - start_bytes)


def first_s(found: Ordered, micro_batch: int) -> float:
    """Median seconds to the first batch after `micro_batch`."""
    seconds = []
    for epoch in range(REPEAT):
        began_s = time.perf_counter()
        next(shares(found, epoch, micro_batch))
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def pass_through(found: Ordered) -> None:
    """Reads the first batches of an epoch, until blocks of indices reach their full size."""
    per_process = found[2] // found[1].world
    for _ in islice(shares(found, 0, 0), 3 * BLOCK // per_process):
        pass


def torch_sampler(samples: int, world: int) -> tuple[float, int]:
    """Seconds to the first index of DistributedSampler, and bytes: it draws a permutation of all samples in each process."""
    from torch.utils.data import DistributedSampler

    other = DistributedSampler(range(samples), num_replicas=world, rank=world // 2, shuffle=True)  # type: ignore[var-annotated, arg-type]

    def begin() -> Iterator[int]:
        indices = iter(other)
        next(indices)
        return indices

    begin()  # warm-up
    return timeit.timeit(begin, number=1), grown_bytes(begin)


def sampler(_: argparse.Namespace) -> str:
    """`ComputedOrder` computes the order of the next steps with a bijection. DistributedSampler stores a permutation of all samples."""
    rows = []

    def add(name: str, samples: int, first_s: float, resumed_s: float, grown_bytes: float) -> None:
        values = (1e3 * first_s, 1e3 * resumed_s, grown_bytes / 1e6)
        rows.append([name, f"{samples:.0e}", *(f"{value:,.3g}" for value in values)])

    for name, (processes, batch) in SETUPS.items():
        for samples in SIZES:
            found = ordered(samples, processes, batch)
            if (steps := len(found[0])) > 1:
                seconds, resumed_s = (first_s(found, start) for start in (0, steps // 2))
                add(name, samples, seconds, resumed_s, grown_bytes(partial(pass_through, found)))
    for samples in SIZES:
        if samples <= MEASURED:
            measured = torch_sampler(samples, 4096)
        seconds, n_bytes = (value * max(1.0, samples / MEASURED) for value in measured)
        add("DistributedSampler (above 1e7 in theory)", samples, seconds, seconds, n_bytes)
    head = ["sampler", "samples", "first batch of an epoch, ms", "resumed in the middle, ms", "process grew by, MB"]
    text = f"One process acts as rank n/2 (of 4,096 for DistributedSampler). Medians of {REPEAT}. Blocks have {BLOCK:,} indices."
    return f"{text}\n\n{table(head, rows)}"


# --- long ---

LONG_STEPS = 20_000
LONG = [
    *SMALL, "run=long", "data.image_size=8", "loader.batch_size=16", "strategy=ddp", "trainer.devices=2", "logger=[csv,tensorboard,wandb]",
    "logger.wandb.mode=offline", "trainer.log_every_n_steps=20", "checkpoint.every_n_steps=200", "checkpoint.save_top_k=3",
    f"trainer.max_steps={LONG_STEPS}",
]  # fmt: skip


def long(args: argparse.Namespace) -> str:
    """Ranks and their child processes. Memory counts pages that belong to no file."""
    run = partial(measuring.train, [*places(args), *LONG])
    processes = held_during(run, args.folder / "runs/long/metrics.csv")
    head = ["process", "", *(f"after {at * LONG_STEPS:,.0f} steps" for at in POINTS)]
    return table(head, held_rows(processes, LONG_STEPS))


# --- predict: a CSV lists simulated files, each a black image, so the disk and Pillow are not measured ---

PATH = "2026/november/{:012}.jpg"


def predict(args: argparse.Namespace) -> str:
    """One process trains a small network, then predicts increasing numbers of files. The growth of the peak is the cost of the added files."""
    from PIL import Image

    from lockstep.kit import Images

    folder, rows = args.folder, []
    for name in ("a", "b"):
        (folder / "data" / name).mkdir(parents=True)
        for number in range(10):
            Image.new("L", (8, 8), number).save(folder / "data" / name / f"{number}.png")
    run = ["run=small", f"runs_dir={folder}/runs", "loader.num_workers=0", *CPU]
    images = ["data=folder", f"data.root={folder}/data", "data.channels=1", "data.image_size=8", "loader.batch_size=8"]
    lockstep.train([*run, *images, f"data.cache_dir={folder}/cache", "trainer.max_steps=1"])
    with patch.object(Images, "read", lambda self, _: {"input": np.zeros((self.channels, 8, 8), np.uint8)}):
        for count in args.files:
            with (folder / "list.csv").open("w") as file:
                file.writelines(["path\n", *(f"{PATH.format(number)}\n" for number in range(count))])
            began_s = time.perf_counter()
            lockstep.predict([*run, f"input={folder}/list.csv", f"output={folder}/{count}.csv", "loader.eval_batch_size=1000"])  # fmt: skip
            rate = count / (time.perf_counter() - began_s)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            rows.append([f"{count:,}", f"{peak / MIB:,.0f}", f"{rate:,.0f}"])
    return table(["files", "peak memory, MiB", "files/s"], rows)


# --- the page ---


SECTIONS = {section.__name__: section for section in (world, memory, sampler, data, long, predict)}


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = measuring.parser(__doc__)
    parser.add_argument("--only", type=some_of(SECTIONS), default=",".join(SECTIONS), help="comma-separated sections")
    parser.add_argument("--worlds", type=numbers, default="1,2,4", help="numbers of processes, starting with 1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="steps of each run, in section world")
    parser.add_argument("--depth", type=int, default=12, help="blocks of the network, in section memory")
    parser.add_argument(
        "--files", type=numbers, default="10000,100000,200000,1000000", help="numbers of files, in section predict"
    )
    parser.add_argument(
        "--data-root", type=Path, help="folder with MNIST and CIFAR-10; without it, the embedded images"
    )
    args = parser.parse_args()
    print(measuring.made_by())
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        for name in args.only:
            print(f"## {name}\n\n{SECTIONS[name](args)}\n", flush=True)


if __name__ == "__main__":
    main()
