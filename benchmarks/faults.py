"""Injects faults into runs at random moments, reruns the same command, and compares the result with that of a fault-free run.

python benchmarks/faults.py [--rounds 3] [--runs 5] [--seed 0] [--only 17]

The runs train 40 steps with every stateful feature, under every strategy, on one host and on two (network namespaces). Each round injects
each fault once into each strategy. There are two good outcomes:
- right: the run, or a rerun of its command, reaches the correct result, bit by bit (weights, optimizer, metrics.csv, test metrics, files)
- clear: it stops with a clear error: exit code 1 or 2, no traceback, and the name of the file, rank or signal
What was saved before the fault must still exist after it. Exit code 1 if a run ends badly. Needs Linux, root and iproute2.
`shards` is fsdp with `checkpoint.sharded=true`; `nodes` are two hosts with one process each.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import hosts
import measuring
import psutil
from measuring import start_command, wait_until

from lockstep import ROOT
from lockstep.checkpoints.finding import checkpoint_paths, is_checkpoint, step_of

sys.path.append(str(ROOT / "tests"))
import forked  # processes from a server that has imported torch
from conftest import write_mnist

COMMAND = [
    "run=run", "data.root=data", "data.cache_dir=cache", "data.image_size=12", "loader.batch_size=28", "loader.eval_batch_size=40",
    "trainer.accelerator=cpu", "trainer.max_epochs=2", "trainer.val_check_interval=10", "trainer.precision=32-true", "trainer.log_every_n_steps=3",
    "trainer.gradient_clip_val=1.0", "trainer.enable_progress_bar=false", "checkpoint.every_n_steps=7", "checkpoint.monitor=val/loss",
    "checkpoint.mode=min", "checkpoint.save_top_k=2", "schedule=cosine", "schedule.warmup_steps=5", "optim.lr=3e-3",
    "callbacks=[default,ema,early_stopping]", "callbacks.ema.decay=0.9", "callbacks.early_stopping.patience=9", "augment=[shift]", "augment.shift.pixels=2", "resume=auto",
]  # fmt: skip
TIMEOUT_S = 15
TWO, NODES, SHARDS = "trainer.devices=2", ["trainer.devices=1", "trainer.num_nodes=2"], "checkpoint.sharded=true"
DDP, FSDP = ([f"strategy={name}", f"strategy.timeout_s={TIMEOUT_S}"] for name in ("ddp", "fsdp"))
SETUPS = {
    "single": ["strategy=single"], "dp": ["strategy=dp"], "ddp": [*DDP, TWO], "fsdp": [*FSDP, TWO], "shards": [*FSDP, TWO, SHARDS],
    "nodes": [*DDP, *NODES], "nodes, shards": [*FSDP, *NODES, SHARDS],
}  # fmt: skip
END_S = 90.0  # for a run to end after a fault
LEFT_S = 2.0  # between the end of one node's command and the kill of a stopped process on the other node
GONE_S = 30.0  # for the remaining processes to end after their command
FILES_S = 5.0  # for files to appear
DISK = "64m"  # size of the disk that is filled
LEFT_BYTES = 300_000  # at most this much is free on that disk: less than a checkpoint
# setns moves the process and its future children to that host.
ENTER = "import ctypes, os\nctypes.CDLL(None).setns(os.open(f\"/run/netns/{os.environ['FAULT_HOST']}\", os.O_RDONLY), 0x40000000)\n"
NAMES = re.compile(r"^error: .*(rank \d|\d\.\d+\.\d|/|SIG[A-Z]+|signal|timeout_s)", re.MULTILINE)
PROMISED = re.compile(r"after (\d+) steps?; \w")
ports = iter(range(21000, 30000))
Case = tuple[str, str]  # names of the fault and the setup


class Badly(Exception):
    """A run ended with neither the right result nor a clear error."""


def send(what: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, what)


class Run:
    """A folder with runs/, data/ and cache/, and the commands that run in it: one per node, each in its own process group."""

    def __init__(self, folder: Path, setup: str, nodes: list[hosts.Host], draw: random.Random) -> None:
        self.setup, self.folder, self.logs, self.draw = setup, folder / "work", folder, draw
        self.saves = self.folder / "runs" / "run"
        self.folder.mkdir(parents=True)
        self.nodes = nodes if "nodes" in setup else []
        self.groups: list[int] = []
        self.notes: list[str] = []
        self.stopped: list[int] = []  # permanently
        self.flipped: dict[Path, tuple[bytes, bytes]] = {}  # contents of a file before and after the flip

    def start(self) -> None:
        if not (self.folder / "data").exists():  # not earlier, because a small disk may be mounted
            write_mnist(self.folder / "data", 640, 103)
        port, self.commands, self.outputs = next(ports), [], []
        (self.logs / "enter.py").write_text(ENTER)
        for rank, node in enumerate(self.nodes or [None]):  # type: ignore[list-item]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            if node:
                env |= {"NODE_RANK": str(rank), "MASTER_ADDR": self.nodes[0].address, "MASTER_PORT": str(port)}
                env |= {"FAULT_HOST": node.name, forked.HOOK: str(self.logs / "enter.py"), "GLOO_SOCKET_IFNAME": "eth0"}
            self.outputs.append(self.logs / f"{len(list(self.logs.glob('*.log')))}.log")
            command = [sys.executable, str(ROOT / "train.py"), *COMMAND, *SETUPS[self.setup]]
            self.commands.append(start_command(command, self.outputs[-1], forked.Popen, cwd=self.folder, env=env))
        self.groups = [command.pid for command in self.commands]

    def ended(self) -> bool:
        return None not in [command.poll() for command in self.commands]

    def begun(self) -> bool:
        return (self.saves / "config.yaml").exists()

    def wait(self, true: Callable[[], bool], every_s: float = 0.002) -> None:
        """Waits until the condition is true or the run has ended."""
        wait_until(lambda: true() or self.ended(), END_S, every_s)

    def processes(self, groups: list[int] | None = None) -> list[int]:
        """The processes of the given commands, or of all; the commands come first."""
        groups, pids = self.groups if groups is None else groups, []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.NoSuchProcess):  # it has ended
                if os.getpgid(process.pid) in groups and process.status() != psutil.STATUS_ZOMBIE:
                    pids.append(process.pid)
        return sorted(pids, key=lambda pid: (pid not in groups, pid))

    def one_rank(self) -> list[int]:
        """A random training process, if there is one: a child of a command, or the command if it has no children."""
        pids = self.processes()
        ranks = [pid for pid in pids if pid not in self.groups] or pids
        return [self.draw.choice(ranks)] if ranks else []

    def one_node(self) -> list[int]:
        return [self.draw.choice(self.groups)]

    def finish(self) -> list[int]:
        """The exit codes of the commands. Raises Badly if they do not end, or leave processes behind."""
        if self.stopped and self.nodes:  # the other node's command ends; a scheduler would then kill the rest
            self.wait(lambda: any(command.poll() is not None for command in self.commands))
            time.sleep(LEFT_S)
            send(signal.SIGKILL, self.stopped)
            self.stopped = []
        if not wait_until(self.ended, END_S, 0.002):
            self.kill()
            raise Badly(f"it was still running {END_S:.0f} s after the fault")
        if not wait_until(lambda: not self.processes(), GONE_S, 0.1):
            self.kill()
            raise Badly(f"processes were still running {GONE_S:.0f} s after the command ended")
        return [command.wait() for command in self.commands]

    def kill(self, groups: list[int] | None = None) -> None:
        send(signal.SIGKILL, self.processes(groups))

    def repair(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)
        for node in self.nodes:
            node.connect()

    def bring_back(self, place: str) -> None:
        for path, (before, after) in self.flipped.items():
            if path.is_relative_to(self.folder / place) and path.is_file() and path.read_bytes() == after:
                path.write_bytes(before)

    def saved(self) -> int:
        """The highest step of a complete checkpoint."""
        with suppress(OSError, StopIteration):  # it was just replaced
            return max(map(step_of, filter(is_checkpoint, checkpoint_paths(self.saves))), default=0)
        return 0

    def compared(self, whole: Path) -> str:
        lines, extra = measuring.differences(whole, self.saves), files(whole) ^ files(self.saves)
        return "; ".join(lines + ([f"files: {sorted(extra)}"] if extra else []))


def files(folder: Path) -> set[str]:
    """All files except the logs of ranks: a rank that is killed before it prints has none."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if path.parts[0] != "logs"}


def said(logs: Iterable[Path]) -> str:
    return "".join(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}" for log in logs)


# --- faults ---


def stop_and(then: signal.Signals, run: Run) -> None:
    """Stops a rank for a while. With SIGCONT, it may also stop a command."""
    pids = run.one_rank()
    if then is signal.SIGCONT and (candidates := run.processes()):
        pids = [run.draw.choice(candidates)]
    send(signal.SIGSTOP, pids)
    time.sleep(run.draw.uniform(0.1, 3.0))
    send(then, pids)


def stop_for_good(run: Run) -> None:
    """Stops a rank permanently. Never a command, because nothing else could end it."""
    run.stopped = [pid for pid in run.one_rank() if pid not in run.groups]
    send(signal.SIGSTOP, run.stopped)


def fill(run: Run) -> None:
    """Fills the small disk that holds the run; `repair` frees the space."""
    filler = run.folder / "filler"
    with filler.open("wb") as file, suppress(OSError):
        while file.write(bytes(1 << 20)):
            file.flush()
    os.truncate(filler, max(0, filler.stat().st_size - run.draw.randint(0, LEFT_BYTES)))


def flip(place: str, pattern: str, run: Run) -> None:
    """Flips one bit of one of the files as soon as they exist. Kills the run afterwards in half of the cases."""

    def existing_files() -> list[Path]:
        with suppress(FileNotFoundError):  # a checkpoint has just taken its name
            return [path for path in (run.folder / place).rglob(pattern) if path.is_file() and path.stat().st_size]
        return []

    wait_until(lambda: bool(existing_files()) or not run.processes(), FILES_S, 0.0)
    if not (matches := existing_files()):
        return
    path = run.draw.choice(sorted(matches))
    with suppress(FileNotFoundError), path.open("r+b") as file:
        content = file.read()
        position = run.draw.randrange(len(content))
        os.pwrite(file.fileno(), bytes([content[position] ^ 1 << run.draw.randrange(8)]), position)
        run.notes.append(f"byte {position} of {path.relative_to(run.folder)}")
        run.flipped[path] = content, path.read_bytes()
    if run.draw.random() < 0.5:
        run.notes.append("killed")
        run.kill()


def cut_network(run: Run, back: bool) -> None:
    node = run.draw.choice(run.nodes)
    node.cut_off()
    if back:
        time.sleep(run.draw.uniform(0.2, 3.0))
        node.connect()


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@dataclass(frozen=True)
class Fault:
    inject: Callable[[Run], None]
    several: bool = False  # needs several processes
    network: bool = False  # needs several nodes
    saving: bool = False  # is injected while a checkpoint is written
    refusal: bool = False  # the rerun command may reject the damaged file


FAULTS = {
    "kill -9 of a rank": Fault(lambda run: send(signal.SIGKILL, run.one_rank())),
    "kill -9 of a rank that saves": Fault(lambda run: send(signal.SIGKILL, run.one_rank()), saving=True),
    "kill -9 of a command with its ranks (a node)": Fault(lambda run: run.kill(run.one_node())),
    "kill -15 of a rank": Fault(lambda run: send(signal.SIGTERM, run.one_rank())),
    "kill -15 of a command": Fault(lambda run: send(signal.SIGTERM, run.one_node())),
    "kill -STOP, later -CONT": Fault(partial(stop_and, signal.SIGCONT)),
    "kill -STOP, later -9": Fault(partial(stop_and, signal.SIGKILL)),
    "kill -STOP for good": Fault(stop_for_good, several=True),
    "disk full": Fault(fill),
    "bit flipped in the data": Fault(partial(flip, "data", "*.gz"), refusal=True),
    "bit flipped in the decoded data": Fault(partial(flip, "cache", "*.*")),
    "bit flipped in a checkpoint": Fault(partial(flip, "runs/run/checkpoints", "*"), refusal=True),
    "network down, then up": Fault(partial(cut_network, back=True), network=True),
    "network down for good": Fault(partial(cut_network, back=False), network=True),
}


# --- runs ---


class Reference(NamedTuple):
    """The files of a fault-free run, and the times when it began and ended."""

    saves: Path
    begun_s: float
    total_s: float


def check_message(run: Run, codes: list[int], killed: bool) -> None:
    """Raises Badly unless the surviving commands report what happened; one report is enough."""
    message = said(run.outputs)
    if "Traceback (most recent call last)" in message:
        raise Badly(f"a traceback (exit codes {codes})")
    if max(codes) > 0 and not NAMES.search(message):
        raise Badly(f"exit codes {codes}, and the message names no rank, address, file, signal or key")
    if min(codes) < 0 and not killed:
        raise Badly(f"ended by {signal.Signals(-min(codes)).name}")


def inject(run: Run, fault: Fault, whole: Reference) -> int | None:
    """Injects the fault at a random moment. Returns the number of steps saved by then; None if the run had already ended."""
    saving = fault.saving or run.draw.random() < 0.2
    early = not saving and run.draw.random() < 0.3
    if not early:
        run.wait(run.begun)
    wait_until(run.ended, run.draw.uniform(0, whole.total_s if early else 0.9 * (whole.total_s - whole.begun_s)), 0.002)
    if saving:
        run.wait(lambda: any(run.saves.glob("checkpoints/*.part")))
        time.sleep(run.draw.uniform(0, 0.005))
    if fault.several:  # the command may not have started its processes yet, or may have outlived them
        run.wait(lambda: len(run.processes()) > len(run.groups), 0.05)
    if run.ended():
        return None
    saved = run.saved()
    fault.inject(run)
    return saved


def verdict(run: Run, fault: Fault, whole: Reference) -> str | None:
    """`right` or `clear`; None if the fault came too late. Raises Badly."""
    run.start()
    if (saved := inject(run, fault, whole)) is None:
        return None
    codes = run.finish()
    check_message(run, codes, killed=True)
    saved = max([saved, *(int(steps) for steps in PROMISED.findall(said(run.outputs)))])
    if not fault.refusal and run.saved() < saved:
        raise Badly(f"{saved} steps were saved, but only {run.saved()} are left")
    run.repair()
    for _ in range(2):
        if any(codes):
            run.start()
            codes = run.finish()
            check_message(run, codes, killed=False)
            if any(codes) and not fault.refusal:
                raise Badly(f"the rerun command fails with exit code {max(codes)}")
            run.bring_back("data")  # restores rejected files from a copy
    if any(codes):
        return "clear"
    run.bring_back("runs")  # restores files damaged after their last use; the next use would reject them
    if differences := run.compared(whole.saves):
        raise Badly(differences)
    return "right"


def reference(folder: Path, setup: str, nodes: list[hosts.Host]) -> Reference:
    run = Run(folder / f"{setup} without faults", setup, nodes, random.Random(0))
    began_s = time.monotonic()
    run.start()
    run.wait(run.begun)
    begun_s = time.monotonic() - began_s
    if any(run.finish()):
        raise RuntimeError(f"{setup}: the run without faults failed\n{said(run.outputs)}")
    return Reference(run.saves, begun_s, time.monotonic() - began_s)


def outcome(case: Case, folder: Path, nodes: list[hosts.Host], draw: random.Random, whole: Reference) -> str:
    """Injects a fault into a run; returns one of KINDS. Starts a new run if the run ends before the fault."""
    name, setup = case
    fault = FAULTS[name]
    kind, reason = None, ""
    while kind is None:
        run, began_s = Run(folder, setup, nodes, draw), time.monotonic()
        with small_disk(run.folder) if fault.inject is fill else nullcontext():
            try:
                kind = verdict(run, fault, whole)
            except Badly as e:
                kind, reason = "badly", f": {e}\n{said(sorted(run.logs.glob('*.log')))}"
            finally:
                run.kill()
                run.repair()
        shutil.rmtree(run.logs)
    notes = ", ".join([name, *run.notes])
    print(f"{folder.name}: {setup}: {notes}: {kind}{reason} [{time.monotonic() - began_s:.1f} s]", flush=True)
    return kind


def cases(rounds: int, draw: random.Random) -> list[Case]:
    """All pairs of fault and setup, in random order."""
    pairs = [(name, setup) for setup in SETUPS for name in FAULTS if "nodes" in setup or not FAULTS[name].network]
    pairs = [(name, setup) for name, setup in pairs if len(SETUPS[setup]) > 1 or not FAULTS[name].several] * rounds
    draw.shuffle(pairs)
    return pairs


KINDS = ("right", "clear", "badly")


def table(tally: Counter[tuple[str, str]]) -> str:
    rows = [[fault, *(str(tally[fault, kind]) for kind in KINDS)] for fault in FAULTS]
    totals = [str(sum(int(row[column]) for row in rows)) for column in range(1, 1 + len(KINDS))]
    return measuring.table(["fault", *KINDS], [*rows, ["all", *totals]])


def main() -> int:
    parser = measuring.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of every fault under every strategy")
    parser.add_argument("--runs", type=int, help="limit the number of runs, drawn from the rounds")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the order, the moments and the places")
    parser.add_argument("--only", type=int, action="append", help="only the run with this number")
    args = parser.parse_args()
    todo = list(enumerate(cases(args.rounds, random.Random(args.seed))))
    if reason := hosts.missing():
        print(f"skipping faults on two hosts and a full disk: {reason}")
        todo = [case for case in todo if "nodes" not in case[1][1] and FAULTS[case[1][0]].inject is not fill]
    todo = [case for case in todo if not args.only or case[0] in args.only][: args.runs]
    tally: Counter[tuple[str, str]] = Counter()
    two: Any = nullcontext([]) if reason else hosts.hosts(2)
    with tempfile.TemporaryDirectory() as name, two as nodes:
        folder = Path(name)
        forked.start_server(folder)
        whole = cache(lambda setup: reference(folder, setup, nodes))
        for number, case in todo:
            draw = random.Random(f"{args.seed} {number}")
            tally[case[0], outcome(case, folder / str(number), nodes, draw, whole(case[1]))] += 1
    measuring.show(table(tally))
    return int(any(kind == "badly" for _, kind in tally))


if __name__ == "__main__":
    sys.exit(main())
