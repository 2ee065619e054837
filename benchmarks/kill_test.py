"""Kills runs at random moments, types the same command again until they are done, and compares them with runs that lived.

python benchmarks/kill_test.py [--kills 10] [--setups single,ddp,fsdp,shards] [--out docs/kills.md]

Each setup trains 60 steps with all that has a state: dropout, augmentation, AdamW, a schedule, an average of the weights, early
stopping, the best scores, means over several steps. A kill is a SIGKILL of the whole process group or of one process alone:
at any moment of the training, while a checkpoint is being written, or at any moment from the command on. The ends are compared
bit by bit: weights, optimizer, metrics.csv, test figures, files. Exit code 1 if one differs. Needs Linux.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from lockstep import ROOT
from lockstep.reporting import comparison

COMMAND = [
    "data.source=embedded", "trainer.accelerator=cpu", "trainer.max_epochs=2", "trainer.limit_train_batches=30", "data.batch_size=64",
    "trainer.val_check_interval=10", "trainer.limit_val_batches=1", "trainer.log_every_n_steps=3", "checkpoint.every_n_steps=4",
    "checkpoint.monitor=val/loss", "checkpoint.mode=min", "checkpoint.save_top_k=2", "schedule=cosine", "schedule.warmup_steps=5",
    "callbacks=[default,ema,early_stopping]", "callbacks.ema.decay=0.9", "data.random_shift=2", "trainer.gradient_clip_val=1.0",
    "trainer.enable_progress_bar=false", "resume=auto",
]  # fmt: skip
SETUPS = {
    "single": ["strategy=single"],
    "ddp": ["strategy=ddp", "trainer.devices=2"],
    "fsdp": ["strategy=fsdp", "trainer.devices=2"],
    "shards": ["strategy=fsdp", "trainer.devices=2", "checkpoint.sharded=true"],
}
MOMENTS = ("training", "training", "saving", "any")  # training is drawn twice as often
TIME_LIMIT_S = 600
GONE_S = 30  # for the other processes to end when one was killed


@dataclass
class Tally:
    runs: int = 0
    identical: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)


class Started:
    """A command in a process group of its own."""

    def __init__(self, folder: Path, run: str, options: list[str]) -> None:
        self.run = folder / "runs" / run
        command = [sys.executable, str(ROOT / "train.py"), f"run={run}", *COMMAND, *options]
        self.began_s = time.monotonic()
        self.log = (folder / f"{run}.log").open("ab")
        self.process = subprocess.Popen(command, cwd=folder, stdout=self.log, stderr=self.log, start_new_session=True)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def ranks(self) -> list[int]:
        """The processes that train: the children of the command, or it alone."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = [int(pid) for pid in path.read_text().split()] if path.exists() else []
        trainers = [pid for pid in children if "LOCKSTEP_JOB" in environment(pid)]
        return trainers or [self.process.pid]

    def writes(self) -> bool:
        """Whether a checkpoint is being written."""
        try:
            return any(entry.name.endswith(".part") for entry in os.scandir(self.run / "checkpoints"))
        except FileNotFoundError:
            return False

    def trains(self) -> bool:
        """Whether this process, not an earlier one, has logged something."""
        path = self.run / "train.log"
        began = time.time() - (time.monotonic() - self.began_s)
        return path.exists() and path.stat().st_mtime > began and b" steps" in path.read_bytes()[-2000:]

    def wait_until(self, condition: object, deadline_s: float) -> bool:
        """False when the process ended first, or the time did."""
        while not self.ended() and time.monotonic() < deadline_s:
            if callable(condition) and condition():
                return True
            time.sleep(0.0005)
        return False

    def kill(self, whom: str, draw: random.Random) -> None:
        """Ends the whole group at once, or one process; the command must then end by itself."""
        if whom == "the group":
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            os.kill(draw.choice(self.ranks()), signal.SIGKILL)
        self.process.wait(GONE_S)
        self.log.close()


def environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def attempt(started: Started, draw: random.Random, times_s: tuple[float, float]) -> str | None:
    """Kills the command at a random moment; returns what was killed when, None if it was done before."""
    startup_s, training_s = times_s
    moment, whom = draw.choice(MOMENTS), draw.choice(("the group", "one process"))
    limit_s = time.monotonic() + TIME_LIMIT_S
    if moment == "any":
        started.wait_until(lambda: False, time.monotonic() + draw.uniform(0, startup_s + training_s))
    elif started.wait_until(started.trains, limit_s):
        started.wait_until(lambda: False, time.monotonic() + draw.uniform(0, training_s))
        if moment == "saving" and started.wait_until(started.writes, limit_s):
            time.sleep(draw.uniform(0, 0.01))
    if moment == "saving" and not started.writes():
        moment = "training"  # too late
    if started.ended():
        if started.process.returncode:
            raise RuntimeError(f"{started.run.name} failed by itself; see {started.log.name}")
        started.log.close()
        return None
    started.kill(whom, draw)
    return f"{moment}, {whom}"


def reference(folder: Path, setup: str) -> tuple[float, float]:
    """The run that lives; returns how long it took to begin and to train."""
    started = Started(folder, f"{setup}-whole", SETUPS[setup])
    started.wait_until(started.trains, started.began_s + TIME_LIMIT_S)
    startup_s = time.monotonic() - started.began_s
    if started.process.wait(TIME_LIMIT_S):
        raise RuntimeError(f"the run without kills failed; see {started.log.name}")
    match = re.search(r'"wall_s": ([\d.]+)', (started.run / "report.json").read_text())
    assert match is not None
    return startup_s, float(match.group(1))


def files(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}


def difference(whole: comparison.Run, other: comparison.Run) -> str:
    found = comparison.compare(whole, other, exact=True, tolerance=0)
    lines = [line for section in found.values() for line in section]
    extra = files(whole.folder) ^ files(other.folder)
    return "; ".join([*lines, *(["files: " + ", ".join(sorted(extra))] if extra else [])])


def kill_test(folder: Path, setup: str, kills: int, draw: random.Random) -> Tally:
    times_s, tally = reference(folder, setup), Tally()
    whole = comparison.find(f"{setup}-whole", folder / "runs")
    while tally.kills.total() < kills:
        name = f"{setup}-{tally.runs}"
        while True:
            left = kills - tally.kills.total()
            started = Started(folder, name, SETUPS[setup])
            killed = attempt(started, draw, times_s) if left else None
            if killed is None:
                if started.process.wait(TIME_LIMIT_S):
                    raise RuntimeError(f"{name} failed by itself; see {started.log.name}")
                break
            tally.kills[killed] += 1
            print(f"{name}: killed ({killed}) after {time.monotonic() - started.began_s:.1f} s", flush=True)
        tally.runs += 1
        told = difference(whole, comparison.find(name, folder / "runs"))
        tally.identical += not told
        tally.differences += [f"{name}: {told}"] * bool(told)
        print(f"{name}: {told or 'identical'}", flush=True)
    return tally


def table(tallies: dict[str, Tally]) -> str:
    lines = [
        "| setup | kills | in training | while saving | at any moment | of the group | of one process | runs | identical ends |"
    ]
    lines.append("| --- " * 9 + "|")
    for setup, tally in tallies.items():
        by = {
            word: sum(n for kind, n in tally.kills.items() if word in kind)
            for word in ("training", "saving", "any", "group", "one")
        }
        counts = " | ".join(map(str, by.values()))
        lines.append(f"| {setup} | {tally.kills.total()} | {counts} | {tally.runs} | {tally.identical} |")
    return "\n".join(lines)


HEADER = """# Killed and typed again

Runs of 60 steps were killed with SIGKILL at random moments and typed again until they finished. Their results were compared bit by
bit with those of an undisturbed run: weights, optimizer, metrics.csv (without speed), test figures, files. Made by
`python benchmarks/kill_test.py {arguments}` with {versions}.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each setup")
    parser.add_argument(
        "--setups", default=",".join(SETUPS), help="single, ddp, fsdp and shards (fsdp with sharded checkpoints)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, help="write the page there as well")
    args = parser.parse_args()
    chosen = args.setups.split(",")
    unknown = sorted(set(chosen) - set(SETUPS))
    if unknown:
        parser.error(f"--setups {args.setups}: {', '.join(unknown)} is unknown; use {', '.join(SETUPS)}")
    tallies: dict[str, Tally] = {}
    with tempfile.TemporaryDirectory() as folder:
        for setup in chosen:
            tallies[setup] = kill_test(Path(folder), setup, args.kills, random.Random(f"{args.seed} {setup}"))
    print(table(tallies))
    kills, runs, same = (
        sum(f(t) for t in tallies.values())
        for f in (lambda t: t.kills.total(), lambda t: t.runs, lambda t: t.identical)
    )
    print(f"{kills} kills, {runs} runs, {same} identical ends")
    if args.out:
        from lockstep.reporting.provenance import versions

        arguments = f"--kills {args.kills} --setups {args.setups} --seed {args.seed}"
        page = HEADER.format(arguments=arguments, versions=versions()) + table(tallies)
        args.out.write_text(f"{page}\n\n{kills} kills, {runs} runs, {same} identical ends.\n")
    return 0 if same == runs else 1


if __name__ == "__main__":
    sys.exit(main())
