"""What the processes of a run hold while it goes on: memory, open files and threads. The part of growth.py that watches. Linux."""

import csv
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 2**20
EVERY_S = 0.1


@dataclass(frozen=True)
class Memory:
    """Of a process, in bytes. `pss` counts a page that n processes share as 1/n: its sum over all of them is what they use."""

    pss: int = 0
    own: int = 0  # pages that belong to no file: what it has made itself
    mapped: int = 0  # what it has of the files in a folder, shared or not
    mapped_pss: int = 0  # the same, shared pages divided

    def __add__(self, other: "Memory") -> "Memory":
        return Memory(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def most(self, other: "Memory") -> "Memory":
        return Memory(*map(max, vars(self).values(), vars(other).values()))


def fields(lines: Iterable[str]) -> dict[str, int]:
    """Sizes of smaps by their names, in bytes."""
    rows = (line.split() for line in lines)
    return {row[0].removesuffix(":"): 1024 * int(row[1]) for row in rows if len(row) == 3 and row[2] == "kB"}


def mapped(smaps: str, folder: Path) -> tuple[int, int]:
    """Resident bytes of the mappings of files in `folder`, whole and with shared pages divided."""
    rss = pss = 0
    inside = False
    for line in smaps.splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):  # the head of a mapping: addresses, flags, and at the end its file
            inside = f" {folder}/" in line
        elif inside and name in ("Rss:", "Pss:"):
            size = 1024 * int(rest.split()[0])
            rss, pss = (rss + size, pss) if name == "Rss:" else (rss, pss + size)
    return rss, pss


def memory_of(pid: int, folder: Path | None) -> Memory:
    """Nothing where the process has ended."""
    try:
        whole = fields(Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
        files = mapped(Path(f"/proc/{pid}/smaps").read_text(), folder) if folder else (0, 0)
    except (FileNotFoundError, ProcessLookupError):
        return Memory()
    return Memory(whole["Pss"], whole["Anonymous"], *files)


def children() -> list[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in lists for pid in path.read_text().split()]


@dataclass
class Watch:
    """`with Watch() as seen: ...`, then `seen.each`, the most that any one child had, and `seen.all`, that all had at a time."""

    folder: Path | None = None
    each: Memory = field(default_factory=Memory)
    all: Memory = field(default_factory=Memory)

    def __enter__(self) -> "Watch":
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.ended.set()
        self.thread.join()

    def look(self) -> None:
        pause_s = EVERY_S
        while not self.ended.wait(pause_s):
            began_s = time.perf_counter()
            now = [memory_of(pid, self.folder) for pid in children()]
            self.all = self.all.most(sum(now, Memory()))
            for one in now:
                self.each = self.each.most(one)
            pause_s = max(EVERY_S, 10 * (time.perf_counter() - began_s))  # the kernel walks through all their pages


LOOK_S = 2.0
KINDS = ("memory, MiB", "open files", "threads")
OPTIONS = [
    "run=long", "model=basic_net", "data.source=embedded", "data.image_size=8", "data.batch_size=16", "strategy=ddp", "trainer.devices=2",
    "trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "logger=[csv,tensorboard,wandb]", "logger.wandb.mode=offline",
    "trainer.log_every_n_steps=20", "checkpoint.every_n_steps=200", "checkpoint.save_top_k=3",
]  # fmt: skip


@dataclass(frozen=True)
class Held:
    """By a process after so many steps."""

    step: int
    values: tuple[float, float, float]  # as in KINDS


def descendants(pid: int | str = "self") -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            yield child
            yield from descendants(child)


def held(pid: int, step: int) -> Held:
    folder = Path(f"/proc/{pid}")
    counts = [float(len(list((folder / name).iterdir()))) for name in ("fd", "task")]
    return Held(step, (memory_of(pid, None).own / MIB, counts[0], counts[1]))


def last_step(metrics: Path) -> int:
    try:
        with metrics.open(newline="") as file:
            return max(
                (int(row["step"]) for row in csv.DictReader(file) if (row.get("step") or "").isdigit()), default=0
            )
    except FileNotFoundError:
        return 0


def looked_at(run: Callable[[], Any], metrics: Path) -> dict[str, list[Held]]:
    """What each process of `run` held, as often as it was looked at; without those that lived for less than half of the looks."""
    seen: dict[int, list[Held]] = {}
    names: dict[int, str] = {}
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            step = last_step(metrics)
            for pid in descendants() if step else ():
                try:
                    names.setdefault(pid, f"{len(names)} {Path(f'/proc/{pid}/comm').read_text().strip()}")
                    seen.setdefault(pid, []).append(held(pid, step))
                except (FileNotFoundError, ProcessLookupError):
                    continue  # it has ended

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        run()
    finally:
        over.set()
        thread.join()
    most = max(map(len, seen.values()), default=0)
    return {names[pid]: looks for pid, looks in seen.items() if len(looks) > most / 2}


def at(looks: list[Held], step: float) -> Held:
    return min(looks, key=lambda one: abs(one.step - step))


def rows(processes: dict[str, list[Held]], steps: int) -> list[list[str]]:
    """Each process: what it held after a tenth, a half and 99% of the steps: at the end it closes."""
    found = []
    for name, looks in processes.items():
        points = [at(looks, share * steps).values for share in (0.1, 0.5, 0.99)]
        for kind, values in zip(KINDS, zip(*points, strict=True), strict=True):
            found.append([name, kind, *(f"{value:,.0f}" for value in values)])
    return found
