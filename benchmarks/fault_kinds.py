"""Faults that are injected into a run while it lives: signals, a full disk, flipped bytes, a network that is down. Linux, root."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import hosts

DISK = "64m"  # of a run whose disk will be full
FILES_S = 5.0  # for files to be there
LEFT_BYTES = 300_000  # at most so much is left of it: less than a checkpoint


@dataclass
class Target:
    """A run: its folder with runs/, data/ and cache/, the process groups of its commands (one a node), and the nodes."""

    folder: Path
    groups: list[int]
    nodes: list[hosts.Host]
    draw: random.Random
    notes: list[str] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)  # for good
    flipped: dict[Path, tuple[bytes, bytes]] = field(default_factory=dict)  # the content of a file before and after

    @property
    def checkpoints(self) -> Path:
        return self.folder / "runs" / "run" / "checkpoints"

    def writes(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(entry.endswith(".part") for entry in listed(self.checkpoints))

    def processes(self, group: int | None = None) -> list[int]:
        """The processes of a command, or of all of them; the commands themselves come first."""
        groups = self.groups if group is None else [group]
        found = [int(name) for name in listed(Path("/proc")) if name.isdigit()]
        return sorted((pid for pid in found if group_of(pid) in groups), key=lambda pid: (pid not in groups, pid))

    def ranks(self) -> list[int]:
        """The processes that train: those that a command has started, or it alone."""
        return [pid for pid in self.processes() if pid not in self.groups] or self.processes()


def listed(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []


def group_of(pid: int) -> int | None:
    """None for a process that has ended, waited for or not."""
    try:
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return None
    return None if state == "Z" else int(group)


def send(what: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, what)


def one(pids: list[int], draw: random.Random) -> list[int]:
    return [draw.choice(pids)] if pids else []


def kill_rank(t: Target) -> None:
    send(signal.SIGKILL, one(t.ranks(), t.draw))


def terminate_rank(t: Target) -> None:
    send(signal.SIGTERM, one(t.ranks(), t.draw))


def terminate_command(t: Target) -> None:
    send(signal.SIGTERM, one(t.groups, t.draw))


def kill_node(t: Target) -> None:
    send(signal.SIGKILL, t.processes(t.draw.choice(t.groups)))


def stop_and_continue(t: Target) -> None:
    stopped = one(t.processes(), t.draw)
    send(signal.SIGSTOP, stopped)
    time.sleep(t.draw.uniform(0.1, 3.0))
    send(signal.SIGCONT, stopped)


def stop_and_kill(t: Target) -> None:
    stopped = one(t.ranks(), t.draw)
    send(signal.SIGSTOP, stopped)
    time.sleep(t.draw.uniform(0.1, 3.0))
    send(signal.SIGKILL, stopped)


def stop_for_good(t: Target) -> None:
    t.stopped = one(t.ranks(), t.draw)
    send(signal.SIGSTOP, t.stopped)


def fill(t: Target) -> None:
    """Everything of the run is on a small disk of its own; `repair` makes room again."""
    with (t.folder / "filler").open("wb") as file, suppress(OSError):
        while file.write(bytes(1 << 20)):
            file.flush()
    os.truncate(t.folder / "filler", max(0, (t.folder / "filler").stat().st_size - t.draw.randint(0, LEFT_BYTES)))


def flip(t: Target, files: Callable[[], list[Path]]) -> None:
    """Changes one bit of one of the files, as soon as there are any; kills the run afterwards, or not."""
    deadline = time.monotonic() + FILES_S
    while not (there := [path for path in files() if path.is_file() and path.stat().st_size]):
        if time.monotonic() > deadline or not t.processes():
            return
    path = t.draw.choice(sorted(there))
    with suppress(FileNotFoundError), path.open("r+b") as file:
        before = file.read()
        place = t.draw.randrange(len(before))
        os.pwrite(file.fileno(), bytes([before[place] ^ 1 << t.draw.randrange(8)]), place)
        t.notes.append(f"byte {place} of {path.relative_to(t.folder)}")
        t.flipped[path] = before, path.read_bytes()
    if t.draw.random() < 0.5:
        t.notes.append("killed")
        send(signal.SIGKILL, t.processes())


def flip_data(t: Target) -> None:
    flip(t, lambda: list((t.folder / "data").rglob("*.gz")))


def flip_cache(t: Target) -> None:
    flip(t, lambda: list((t.folder / "cache").rglob("*.*")))


def flip_checkpoint(t: Target) -> None:
    flip(t, lambda: list(t.checkpoints.rglob("*")))


def drop_network(t: Target) -> None:
    node = t.draw.choice(t.nodes)
    node.cut_off()
    time.sleep(t.draw.uniform(0.2, 3.0))
    node.connect()


def cut_network(t: Target) -> None:
    t.draw.choice(t.nodes).cut_off()


def repair(t: Target) -> None:
    (t.folder / "filler").unlink(missing_ok=True)
    for node in t.nodes:
        node.connect()


@dataclass(frozen=True)
class Fault:
    inject: Callable[[Target], None]
    several: bool = False  # only where there are several processes
    network: bool = False  # only where there are several nodes
    saving: bool = False  # always while a checkpoint is written
    refusal: bool = False  # the command that is typed again may refuse what is damaged


FAULTS = {
    "kill -9 of a rank": Fault(kill_rank),
    "kill -9 of a rank that saves": Fault(kill_rank, saving=True),
    "kill -9 of a command with its ranks (a node)": Fault(kill_node),
    "kill -15 of a rank": Fault(terminate_rank),
    "kill -15 of a command": Fault(terminate_command),
    "kill -STOP, later -CONT": Fault(stop_and_continue),
    "kill -STOP, later -9": Fault(stop_and_kill),
    "kill -STOP for good": Fault(stop_for_good, several=True),
    "disk full": Fault(fill),
    "bit flipped in the data": Fault(flip_data, refusal=True),
    "bit flipped in the decoded data": Fault(flip_cache),
    "bit flipped in a checkpoint": Fault(flip_checkpoint, refusal=True),
    "network down, then up": Fault(drop_network, network=True),
    "network down for good": Fault(cut_network, network=True),
}


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
