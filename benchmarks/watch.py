"""The memory of the processes that this one has started, looked at again and again while they run. Linux."""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


def memory(pid: int, folder: Path | None) -> Memory:
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
            now = [memory(pid, self.folder) for pid in children()]
            self.all = self.all.most(sum(now, Memory()))
            for one in now:
                self.each = self.each.most(one)
            pause_s = max(EVERY_S, 10 * (time.perf_counter() - began_s))  # the kernel walks through all their pages
