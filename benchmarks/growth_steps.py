"""What the processes of a long run hold over its steps: memory, open files and threads. Linux.

The run has a checkpoint every 200 steps, a validation every 265, a row in all loggers every 20.
"""

import csv
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from watch import memory

EVERY_S = 2.0
MIB = 2**20
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
    return Held(step, (memory(pid, None).own / MIB, counts[0], counts[1]))


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
        while not over.wait(EVERY_S):
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
