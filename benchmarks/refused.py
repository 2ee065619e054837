"""Tries command lines and files that cannot work, and counts how they are refused.

python benchmarks/refused.py [--only <text>] [--jobs 2] [--before <file>] [--save <file>] [--out docs/refused.md]

A case is refused well if train.py ends with exit code 2 and messages that name the key, without a traceback, before the run
begins, and leaves no file. Each case is a process forked from one that has imported torch, as imports would take most of the time;
the table adds the time that they take to the cases that need them. The cases are in refused_cases.py. `--save` keeps the
verdicts; `--before` compares with kept ones. Needs Linux.
"""

import argparse
import contextlib
import json
import os
import resource
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from refused_cases import Case, cases

from lockstep import ROOT
from lockstep.machine.world import World, cores
from lockstep.reporting.provenance import versions

LIMIT_S = 20.0  # a case that trains longer than this was accepted
MEMORY_BYTES = 3 * 2**30  # of data, so an archive that unpacks to more ends in a MemoryError
WELL, LATE, DIM, TRACEBACK, SILENT = "refused well", "late", "dim", "traceback", "accepted in silence"
LEFT, WORKS, WRONGLY = "left files", "works", "refused wrongly"
COLUMNS = (WELL, LATE, DIM, LEFT, TRACEBACK, SILENT)
BASE = ["data.root=own", "data.source=disk", "data.batch_size=16", "data.image_size=12", "trainer.accelerator=cpu", "trainer.max_steps=2",
        "trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "trainer.enable_progress_bar=false"]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of a case. `stage`: config (nothing but the config was read), classes, or run."""

    family: str
    name: str
    verdict: str
    elapsed_s: float
    stage: str
    code: int
    message: str


def verdict(case: Case, code: int | None, message: str, stage: str, left: list[str]) -> str:
    """`code` is None for a case that ran too long."""
    if case.works or (case.may_work and code == 0):
        return WORKS if code == 0 else WRONGLY
    if code == 0 or (code is None and stage == "run"):
        return SILENT
    if code != 2 or "Traceback" in message:
        return TRACEBACK
    if stage == "run":
        return LATE
    if left:
        return LEFT
    told = [line for line in message.splitlines() if not line.startswith("WARNING")]
    good = any("error: " in line and case.key in line for line in told)
    return WELL if good else DIM


# --- a case in a process of its own ---


def lay_out(case: Case, folder: Path) -> None:
    from refused_cases import digits

    files = case.files if any(name.partition("/")[0] == "own" for name in case.files) else {**digits(), **case.files}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def noted(stages: int) -> None:
    """Makes this process write how far it has come; and run the processes of a run in this one."""
    from lockstep.launch import jobs, local, start

    def note(letter: bytes, call: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            os.write(stages, letter)
            return call(*args, **kwargs)

        return noting

    def alone(script: Path, cfg: Any, world: World) -> None:
        os.environ.update(local.environment(cfg, world, 0, local.free_port()))
        os.environ.pop(local.JOB)
        jobs.load(script)(cfg, world)

    stage: Any = start
    stage.check_classes = note(b"c", stage.check_classes)
    stage.identify = note(b"r", stage.identify)
    local.run_processes = alone


def child(case: Case, folder: Path, cache: Path, stages: int) -> None:
    """Becomes `python train.py` in `folder`."""
    import torch

    os.setsid()
    os.chdir(folder)
    with Path(folder, os.pardir, f"{folder.name}.err").open("wb") as file:
        os.dup2(file.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.update({"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", **case.env})
    torch.set_num_threads(1)
    noted(stages)
    typed = [arg.partition("=")[0] for arg in case.args] + ["data.source"] * ("data=folder" in case.args)
    sys.argv[:] = [
        "train.py",
        *(arg for arg in BASE if arg.partition("=")[0] not in typed),
        f"data.cache_dir={cache}",
        *case.args,
    ]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def forked(case: Case, folder: Path, cache: Path, stages: int) -> int:
    if pid := os.fork():
        return pid
    code = 0
    try:
        child(case, folder, cache, stages)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stderr.flush()
        os._exit(code)


@dataclass
class Running:
    case: Case
    folder: Path
    read: int
    before: set[Path]
    began_s: float

    def ended(self, pid: int, cost: dict[str, float]) -> Outcome | None:
        """The outcome, once the process has ended or has run too long."""
        elapsed_s = time.monotonic() - self.began_s
        done, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        if not done and elapsed_s < LIMIT_S:
            return None
        with contextlib.suppress(ProcessLookupError):  # it, and what it has started
            os.killpg(pid, signal.SIGKILL)
        if not done:
            os.waitpid(pid, 0)
        letters = os.read(self.read, 100)
        os.close(self.read)
        stage = "run" if b"r" in letters else "classes" if b"c" in letters else "config"
        imports = (
            "torch"
            if stage == "run" or any("_target_" in a or a[0] == "+" for a in self.case.args if stage == "classes")
            else "config"
        )
        message = self.folder.with_suffix(".err").read_text(errors="replace")
        left = sorted(str(path.relative_to(self.folder)) for path in set(self.folder.rglob("*")) - self.before)
        what = verdict(self.case, code, message, stage, left)
        return Outcome(
            self.case.family,
            self.case.name[:150],
            what,
            elapsed_s + cost[imports],
            stage,
            -1 if code is None else code,
            message[-600:],
        )


def tried(every: list[Case], jobs: int, cost: dict[str, float]) -> Iterator[Outcome]:
    """Runs `jobs` cases at once."""
    assert threading.active_count() == 1, "forking a process with threads is not safe"
    waiting, running = list(enumerate(every)), dict[int, Running]()
    with tempfile.TemporaryDirectory() as place:
        cache = Path(place, "cache")
        while waiting or running:
            while waiting and len(running) < jobs:
                number, case = waiting.pop(0)
                folder = Path(place, str(number))
                folder.mkdir()
                lay_out(case, folder)
                before = set(folder.rglob("*"))
                read, write = os.pipe()
                os.write(write, b".")
                pid = forked(case, folder, cache, write)
                os.close(write)
                running[pid] = Running(case, folder, read, before, time.monotonic())
            for pid, each in list(running.items()):
                if (outcome := each.ended(pid, cost)) is not None:
                    del running[pid]
                    yield outcome
            time.sleep(0.01)


def import_s(what: str) -> float:
    """The seconds of `import what` in a new process; the faster of two."""
    taken = []
    for _ in range(2):
        began_s = time.monotonic()
        subprocess.run([sys.executable, "-c", f"import {what}"], check=True)
        taken.append(time.monotonic() - began_s)
    return min(taken)


def preload() -> None:
    import lockstep.build
    import lockstep.launch.start
    import lockstep.reporting.page
    import lockstep.training.memory  # noqa: F401


# --- the page ---


def percentile(values: list[float]) -> str:
    return f"{statistics.quantiles(values, n=20, method='inclusive')[-1]:.1f}" if len(values) > 1 else ""


def table(outcomes: list[Outcome]) -> str:
    lines = [
        f"| family | cases | {' | '.join(COLUMNS)} | s, 95th percentile |",
        f"| --- | {'--- | ' * (len(COLUMNS) + 2)}",
    ]
    refusable = [o for o in outcomes if o.verdict not in (WORKS, WRONGLY)]
    for family in [*dict.fromkeys(o.family for o in refusable), "all"]:
        own = [o for o in refusable if family in (o.family, "all")]
        counts = Counter(o.verdict for o in own)
        times = percentile([o.elapsed_s for o in own])
        lines.append(f"| {family} | {len(own)} | {' | '.join(str(counts[name]) for name in COLUMNS)} | {times} |")
    works = Counter(o.verdict for o in outcomes)
    return (
        "\n".join(lines) + f"\n\nOf {works[WORKS] + works[WRONGLY]} command lines that must work, {works[WORKS]} did.\n"
    )


def rest(outcomes: list[Outcome]) -> str:
    """The cases that were not refused well."""
    bad = [o for o in outcomes if o.verdict not in (WELL, WORKS)]
    return "\n".join(f"- {o.verdict}: `{o.name}`" for o in sorted(bad, key=lambda o: (o.verdict, o.family)))


def page(now: list[Outcome], before: list[Outcome]) -> str:
    text = __doc__.split("\n\n", 2)[2]
    parts = [
        f"# What is refused, and how\n\nMade by `python benchmarks/refused.py` with {versions()}, on {cores()} CPU cores.\n\n{text}"
    ]
    parts += [f"## Now\n\n{table(now)}\nNot refused well:\n\n{rest(now) or 'none'}\n"]
    parts += (
        [f"## Before\n\nThe same cases, before the checks were made from general rules.\n\n{table(before)}"]
        if before
        else []
    )
    return "\n".join(parts)


def load(path: Path | None) -> list[Outcome]:
    return [Outcome(**each) for each in json.loads(path.read_text())] if path else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose family or command line has this text")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--before", type=Path, help="verdicts of an earlier call")
    parser.add_argument("--save", type=Path, help="keep the verdicts")
    parser.add_argument("--out", type=Path, help="write the page there as well")
    args = parser.parse_args()
    config_s = import_s("lockstep.launch.start, lockstep.config.compose")
    cost = {"config": config_s, "torch": config_s + import_s("lockstep.build")}
    preload()
    chosen = [case for case in cases() if args.only in case.family or args.only in case.name]
    outcomes = []
    for outcome in tried(chosen, args.jobs, cost):
        outcomes.append(outcome)
        if args.only or outcome.verdict not in (WELL, WORKS):
            print(f"{outcome.verdict:20} {outcome.elapsed_s:5.1f} s  {outcome.name}", file=sys.stderr, flush=True)
    if args.save:
        args.save.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=0))
    text = page(outcomes, load(args.before))
    print(text)
    if args.out:
        args.out.write_text(text)
    return int(any(outcome.verdict not in (WELL, WORKS) for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
