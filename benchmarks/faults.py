"""Injects faults into runs at random moments, types the same command again, and compares the end with that of a run without faults.

python benchmarks/faults.py [--rounds 3] [--runs 5] [--seed 0] [--only 17] [--out docs/measurements/faults.md]

The runs train 40 steps with all that has a state, under every strategy, on one host and on two (network namespaces). Each round injects
each fault once into each strategy. A run ends well in the right result, bit by bit (weights, optimizer, metrics.csv, test figures, files), at
once or when its command is typed again; or with a clear error: exit code 2 or 1, no traceback, the file, the rank or the signal by
name. What was saved before the fault must be there after it. Exit code 1 if a run ends badly. Needs Linux, root and iproute2.
"""

import argparse
import os
import queue
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import hosts
from fault_kinds import FAULTS, Fault, Target, fill, repair, send, small_disk
from sections import write_section

from lockstep import ROOT
from lockstep.checkpoints.finding import found_in, is_checkpoint, step_of
from lockstep.extras import comparison

sys.path.append(str(ROOT / "tests"))
import forked  # processes from a server that has imported torch
from conftest import write_mnist

COMMAND = [
    "run=run", "data.root=data", "data.cache_dir=cache", "data.image_size=12", "data.batch_size=28", "data.eval_batch_size=40",
    "trainer.accelerator=cpu", "trainer.max_epochs=2", "trainer.val_check_interval=10", "trainer.precision=32-true", "trainer.log_every_n_steps=3",
    "trainer.gradient_clip_val=1.0", "trainer.enable_progress_bar=false", "checkpoint.every_n_steps=7", "checkpoint.monitor=val/loss",
    "checkpoint.mode=min", "checkpoint.save_top_k=2", "schedule=cosine", "schedule.warmup_steps=5", "optim.lr=3e-3",
    "callbacks=[default,ema,early_stopping]", "callbacks.ema.decay=0.9", "callbacks.early_stopping.patience=9", "augment=[shift]", "augment.shift.pixels=2", "resume=auto",
]  # fmt: skip
TIMEOUT_S = 15
TWO, NODES = ["trainer.devices=2"], ["trainer.devices=1", "trainer.num_nodes=2"]
DDP, FSDP = (["strategy=ddp", f"strategy.timeout_s={TIMEOUT_S}"], ["strategy=fsdp", f"strategy.timeout_s={TIMEOUT_S}"])
SHARDS = ["checkpoint.sharded=true"]
SETUPS = {
    "single": ["strategy=single"], "dp": ["strategy=dp"], "ddp": [*DDP, *TWO], "fsdp": [*FSDP, *TWO], "shards": [*FSDP, *TWO, *SHARDS],
    "nodes": [*DDP, *NODES], "nodes, shards": [*FSDP, *NODES, *SHARDS],
}  # fmt: skip
END_S = 90.0  # for a run to end after its fault
LEFT_S = 2.0  # between the end of one node's command and the kill of a stopped process on the other
GONE_S = 30.0  # for the other processes of a command that ended
# setns: the process and what it starts are on that host from now on.
ENTER = "import ctypes, os\nctypes.CDLL(None).setns(os.open(f\"/run/netns/{os.environ['FAULT_HOST']}\", os.O_RDONLY), 0x40000000)\n"
NAMES = re.compile(r"^error: .*(rank \d|\d\.\d+\.\d|/|SIG[A-Z]+|signal|timeout_s)", re.MULTILINE)
PROMISED = re.compile(r"after (\d+) steps; (?:type|everything is saved)")
ports = iter(range(21000, 30000))


class Badly(Exception):
    """A run that ended neither well nor in a clear error."""


class Run:
    """A folder with its data, and the commands that are typed there: one a node."""

    def __init__(self, folder: Path, setup: str, nodes: list[hosts.Host], draw: random.Random) -> None:
        self.setup, self.folder, self.logs = setup, folder / "work", folder
        self.folder.mkdir(parents=True)
        self.nodes = nodes if "nodes" in setup else []
        self.target = Target(self.folder, [], self.nodes, draw)

    def start(self) -> None:
        if not (self.folder / "data").exists():  # here: the disk may be another one by now
            write_mnist(self.folder / "data", 640, 103)
        port, self.commands, self.outputs = next(ports), [], []
        for rank, node in enumerate(self.nodes or [None]):  # type: ignore[list-item]
            place = {"OMP_NUM_THREADS": "1"}
            if node:
                (self.logs / "enter.py").write_text(ENTER)
                place |= {"NODE_RANK": str(rank), "MASTER_ADDR": self.nodes[0].address, "MASTER_PORT": str(port)}
                place |= {
                    "FAULT_HOST": node.name,
                    forked.HOOK: str(self.logs / "enter.py"),
                    "GLOO_SOCKET_IFNAME": "eth0",
                }
            self.outputs.append(self.logs / f"{len(list(self.logs.glob('*.log')))}.log")
            with self.outputs[-1].open("wb") as log:
                self.commands.append(
                    forked.Popen([sys.executable, str(ROOT / "train.py"), *COMMAND, *SETUPS[self.setup]], cwd=self.folder,
                                 env={**os.environ, **place}, stdin=forked.DEVNULL, stdout=log, stderr=log, start_new_session=True)
                )  # fmt: skip
        self.target.groups = [command.pid for command in self.commands]

    def ended(self) -> bool:
        return None not in [command.poll() for command in self.commands]

    def begun(self) -> bool:
        return (self.folder / "runs" / "run" / "config.yaml").exists()

    def finish(self) -> list[int]:
        """The exit codes of the commands. Raises Badly if they do not end, or leave processes."""
        if self.target.stopped and self.nodes:  # the other node's command ends; a scheduler then kills what is left
            wait(lambda: any(command.poll() is not None for command in self.commands), END_S)
            time.sleep(LEFT_S)
            send(signal.SIGKILL, self.target.stopped)
            self.target.stopped = []
        if not wait(self.ended, END_S):
            self.kill()
            raise Badly(f"it had not ended {END_S:.0f} s after the fault")
        if not wait(lambda: not self.target.processes(), GONE_S, 0.1):
            self.kill()
            raise Badly(f"processes were left {GONE_S:.0f} s after the command")
        return [command.wait() for command in self.commands]

    def kill(self) -> None:
        send(signal.SIGKILL, self.target.processes())

    def said(self, paths: Iterable[Path]) -> str:
        return "".join(f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in paths)

    def saved(self) -> int:
        """The most steps of a complete checkpoint."""
        try:
            found = [path for path in found_in(self.folder / "runs" / "run") if is_checkpoint(path)]
            return max(map(step_of, found), default=0)
        except (OSError, StopIteration):  # replaced just now
            return 0

    def bring_back(self, place: str) -> None:
        for path, (before, after) in self.target.flipped.items():
            if path.is_relative_to(self.folder / place) and path.is_file() and path.read_bytes() == after:
                path.write_bytes(before)

    def compared(self, whole: Path) -> str:
        a, b = (comparison.find("run", folder / "runs") for folder in (whole, self.folder))
        sections = comparison.compare(a, b, exact=True, tolerance=0)
        extra = files(a.folder) ^ files(b.folder)
        return "; ".join(line for name in ("data", "log", "figures", "weights") for line in sections[name]) + (
            f" files: {sorted(extra)}" if extra else ""
        )


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def wait(true: Callable[[], bool], limit_s: float, every_s: float = 0.002) -> bool:
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def check_message(run: Run, codes: list[int], killed: bool) -> None:
    """Raises Badly unless the commands that could still speak say what happened: one of them, if they all know it."""
    said = run.said(run.outputs)
    if "Traceback (most recent call last)" in said:
        raise Badly(f"a traceback (exit codes {codes})")
    if max(codes) > 0 and not NAMES.search(said):
        raise Badly(f"exit codes {codes}, and no rank, address, file, signal or key is named")
    if min(codes) < 0 and not killed:
        raise Badly(f"ended by {signal.Signals(-min(codes)).name}")


def inject(run: Run, fault: Fault, times_s: tuple[float, float], draw: random.Random) -> int | None:
    """Waits for a random moment. Returns the steps that were saved by then; None if the run ended before."""
    begun_s, total_s = times_s
    saving = fault.saving or draw.random() < 0.2
    early = not saving and draw.random() < 0.3
    if not early:
        wait(lambda: run.begun() or run.ended(), END_S)
    wait(run.ended, draw.uniform(0, total_s if early else 0.9 * (total_s - begun_s)))
    if saving:
        wait(lambda: run.target.writes() or run.ended(), END_S)
        time.sleep(draw.uniform(0, 0.005))
    if run.ended():
        return None
    saved = run.saved()
    fault.inject(run.target)
    return saved


def verdict(run: Run, fault: Fault, whole: Path, times_s: tuple[float, float], draw: random.Random) -> str | None:
    """`right` or `clear`; None if the fault came too late. Raises Badly."""
    run.start()
    saved = inject(run, fault, times_s, draw)
    if saved is None:
        return None
    codes = run.finish()
    check_message(run, codes, killed=True)
    saved = max([saved, *(int(steps) for steps in PROMISED.findall(run.said(run.outputs)))])
    if not fault.refusal and run.saved() < saved:
        raise Badly(f"{saved} steps were saved, and {run.saved()} are left")
    repair(run.target)
    for _ in range(2):
        if not any(codes):
            break
        run.start()
        codes = run.finish()
        check_message(run, codes, killed=False)
        if any(codes) and not fault.refusal:
            raise Badly(f"typed again, it fails with exit code {max(codes)}")
        run.bring_back("data")  # what was refused comes back from a copy
    if any(codes):
        return "clear"
    run.bring_back("runs")  # what was damaged after its last use, and would be refused at the next
    if told := run.compared(whole):
        raise Badly(told)
    return "right"


class Injector:
    """Runs cases, several at a time if asked to: each with two hosts of its own."""

    def __init__(self, folder: Path, seed: int, nodes: list[hosts.Host], workers: int, ends_s: float) -> None:
        self.folder, self.seed, self.ends_s = folder, seed, ends_s
        self.pairs: queue.SimpleQueue[list[hosts.Host]] = queue.SimpleQueue()
        for i in range(workers):
            self.pairs.put(nodes[2 * i : 2 * i + 2])
        self.locks = {setup: threading.Lock() for setup in SETUPS}
        self.references: dict[str, tuple[Path, tuple[float, float]]] = {}

    def reference(self, setup: str, nodes: list[hosts.Host]) -> tuple[Path, tuple[float, float]]:
        """The folder of a run without faults, and how long it took to begin and to end."""
        with self.locks[setup]:
            if setup not in self.references:
                run = Run(self.folder / f"{setup} without faults", setup, nodes, random.Random(0))
                began_s = time.monotonic()
                run.start()
                wait(lambda: run.begun() or run.ended(), END_S)
                begun_s = time.monotonic() - began_s
                if any(run.finish()):
                    raise RuntimeError(f"{setup}: the run without faults failed\n{run.said(run.outputs)}")
                self.references[setup] = run.folder, (begun_s, time.monotonic() - began_s)
        return self.references[setup]

    def run(self, number: int, fault: str, setup: str) -> str | None:
        """`right`, `clear` or `badly`; None after the end of the time."""
        if time.monotonic() > self.ends_s:
            return None
        nodes = self.pairs.get()
        whole, times_s = self.reference(setup, nodes)
        draw, kind, why = random.Random(f"{self.seed} {number}"), None, ""
        while kind is None:  # again if it ended before the fault
            run, began_s = Run(self.folder / str(number), setup, nodes, draw), time.monotonic()
            with small_disk(run.folder) if FAULTS[fault].inject is fill else nullcontext():
                try:
                    kind = verdict(run, FAULTS[fault], whole, times_s, draw)
                except Badly as e:
                    kind, why = "badly", f": {e}\n{run.said(sorted(run.logs.glob('*.log')))}"
                finally:
                    run.kill()
                    repair(run.target)
            shutil.rmtree(run.logs)
        self.pairs.put(nodes)
        notes = ", ".join([fault, *run.target.notes])
        print(f"{number}: {setup}: {notes}: {kind}{why} [{time.monotonic() - began_s:.1f} s]", flush=True)
        return kind


def cases(rounds: int, draw: random.Random) -> list[tuple[str, str]]:
    """(fault, setup) of each run, in random order."""
    one = [
        (name, setup)
        for setup, options in SETUPS.items()
        for name, fault in FAULTS.items()
        if ("nodes" in setup or not fault.network) and (len(options) > 1 or not fault.several)
    ]
    found = one * rounds
    draw.shuffle(found)
    return found


HEADER = """# Faults

Faults were injected at random moments into runs of 40 steps: while they start, decode, train, save, evaluate. Then the same command was
typed again (`resume=auto`), and the end was compared bit by bit with that of a run without faults: weights, optimizer, metrics.csv
(without speed), test figures, files. ddp and fsdp have two processes; `shards` is fsdp with `checkpoint.sharded=true`; `nodes` are two
hosts with a process each (network namespaces). These are the first {runs} runs of `python benchmarks/faults.py {arguments}` with
{versions}.

**{right} runs ended in the right result, {clear} in a clear error that only a good copy of the damaged file can mend, {badly} badly.** A run ends
badly if its result differs, if it hangs or leaves processes, if it shows a traceback, if its error names no rank, address, file,
signal or key, or if a checkpoint is lost that was saved before the fault.

Each cell: runs · right result · clear error. A cell is empty if the strategy cannot have the fault, or if no run was drawn.

"""
FOOTER = """
A bit flipped in a file without a checksum of its own, such as a plain idx file, before a run first reads it is not noticed: the run
trains on what it finds, and `data/sha256` in its report.json differs. While a process of one of two nodes is stopped for good,
the other node's command ends; the script then kills the stopped process, as a scheduler does.
"""


def table(tally: Counter[tuple[str, str, str]]) -> str:
    lines = [f"| fault | {' | '.join(SETUPS)} | badly |", "| --- " * (len(SETUPS) + 2) + "|"]
    for fault in FAULTS:
        cells = []
        for setup in SETUPS:
            right, clear, badly = (tally[fault, setup, kind] for kind in ("right", "clear", "badly"))
            runs = right + clear + badly
            cells.append(f"{runs} · {right} · {clear}" if runs else "")
        badly = sum(tally[fault, setup, "badly"] for setup in SETUPS)
        lines.append(f"| {fault} | {' | '.join(cells)} | {badly} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of every fault under every strategy")
    parser.add_argument("--runs", type=int, help="only so many, drawn from the rounds")
    parser.add_argument("--seed", type=int, default=0, help="of the order, the moments and the places")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, help="begin no run after so many")
    parser.add_argument("--only", type=int, action="append", help="the run of this number")
    parser.add_argument("--out", type=Path, help="write the page there as well")
    args = parser.parse_args()
    todo = list(enumerate(cases(args.rounds, random.Random(args.seed))))
    if reason := hosts.missing():
        print(f"without two hosts and without a full disk: {reason}")
        todo = [case for case in todo if "nodes" not in case[1][1] and FAULTS[case[1][0]].inject is not fill]
    todo = [case for case in todo if not args.only or case[0] in args.only][: args.runs]
    ends_s = time.monotonic() + 60 * (args.minutes or 1e6)
    with tempfile.TemporaryDirectory() as folder, hosts.hosts(0 if reason else 2 * args.workers) as nodes:
        forked.start_server(Path(folder))
        injector = Injector(Path(folder), args.seed, nodes, args.workers, ends_s)
        with ThreadPoolExecutor(args.workers) as pool:
            try:
                kinds = list(pool.map(lambda case: injector.run(case[0], *case[1]), todo))
            finally:
                injector.ends_s = 0.0
    tally = Counter((*case, kind) for (_, case), kind in zip(todo, kinds, strict=True) if kind)
    found = {kind: sum(count for key, count in tally.items() if key[2] == kind) for kind in ("right", "clear", "badly")}
    print(table(tally), ", ".join(f"{count} {kind}" for kind, count in found.items()))
    if args.out:
        from lockstep.run.report import versions

        told = {
            "arguments": f"--rounds {args.rounds} --seed {args.seed}",
            "versions": versions(),
            "runs": tally.total(),
        }
        write_section(args.out, HEADER.format(**told, **found) + table(tally) + FOOTER)
    return 1 if found["badly"] else 0


if __name__ == "__main__":
    sys.exit(main())
