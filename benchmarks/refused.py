"""Tries command lines and files that cannot work, and counts how they are rejected.

python benchmarks/refused.py [--only <text>] [--every 3] [--jobs 2] [--save <file>]

A case is rejected well if train.py ends with exit code 2 and messages that name the key, without a traceback, before the run's
directory is made, and leaves no file. Some of these need torch: whether a network takes the images is known once it is made. Each case is
a process forked from one that has imported torch, because imports would take most of the time; the table adds the time of the imports
to the cases that need them. The cases are in refused_cases.py. `--save` keeps the verdicts. Needs Linux.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import measuring
from measuring import ArgumentParser, made_by
from refused_cases import Case, cases, digits

from lockstep import ROOT

sys.path.append(str(ROOT / "tests"))
import forked  # processes from a server that has imported torch

LIMIT_S = 20.0  # a case that trains longer than this was accepted
HOOK = str(Path(__file__).with_name("refused_hook.py").resolve())
OFFLINE = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
WELL, LATE, DIM, TRACEBACK, SILENT = "rejected well", "late", "unclear", "traceback", "accepted in silence"
LEFT, WORKS, WRONGLY = "left files", "works", "rejected wrongly"
WITH_TORCH = "of these with torch"
COLUMNS = (WELL, WITH_TORCH, LATE, DIM, LEFT, TRACEBACK, SILENT)
STAGES = ("run", "torch", "classes")  # that refused_hook.py notes, the last one first
BASE = ["data.root=own", "data.source=disk", "data.batch_size=16", "data.image_size=12", "trainer.accelerator=cpu", "trainer.max_steps=2",
        "trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "trainer.enable_progress_bar=false"]  # fmt: skip
MADE = ("a wrong value", "a key is", "a name is misspelt")  # families made from the schema's keys


@dataclass(frozen=True)
class Outcome:
    """The result of a case. `stage`: config (nothing but the config was read), classes, torch (everything was built), or run."""

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
    good = any("error: " in line for line in told) and any(case.key in line for line in told)
    return WELL if good else DIM


# --- a case in a process of its own, forked from a server that has imported torch ---


def import_s(what: str) -> float:
    """The seconds of `import what` in a new process; the faster of two."""
    taken = []
    for _ in range(2):
        began_s = time.monotonic()
        subprocess.run([sys.executable, "-c", f"import {what}"], check=True)
        taken.append(time.monotonic() - began_s)
    return min(taken)


def write_files(case: Case, folder: Path) -> None:
    own = any(name.startswith("own") for name in case.files)
    for name, content in {**({} if own else digits()), **case.files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    folder.mkdir(exist_ok=True)


def tried(case: Case, folder: Path, cost_s: dict[str, float]) -> Outcome:
    """Runs `python train.py` in `folder`, for at most LIMIT_S."""
    write_files(case, folder)
    before, began_s = set(folder.rglob("*")), time.monotonic()
    errors, stages = folder.with_suffix(".err"), folder.with_suffix(".stages")
    typed = [arg.partition("=")[0] for arg in case.args] + ["data.source"] * ("data=folder" in case.args)
    base = [arg for arg in BASE if arg.partition("=")[0] not in typed]
    command = [sys.executable, str(ROOT / "train.py"), *base, f"data.cache_dir={folder.parent / 'cache'}", *case.args]
    env = {**os.environ, **OFFLINE, **case.env, forked.HOOK: HOOK, "REFUSED_STAGES": str(stages)}
    with errors.open("wb") as file:
        process = forked.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=forked.DEVNULL,
            stdout=forked.DEVNULL,
            stderr=file,
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_S)
        except forked.TimeoutExpired:
            code = None
        elapsed_s = time.monotonic() - began_s
        with contextlib.suppress(ProcessLookupError):  # the command, and what it has started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    noted = stages.read_text().split() if stages.exists() else []
    stage = next((name for name in STAGES if name in noted), "config")
    imports = stage == "classes" and any("_target_" in arg or arg[0] == "+" for arg in case.args)
    elapsed_s += cost_s["torch" if stage in ("torch", "run") or imports else "config"]
    message = errors.read_text(errors="replace")
    left = sorted(str(path.relative_to(folder)) for path in set(folder.rglob("*")) - before)
    kind = verdict(case, code, message, stage, left)
    return Outcome(case.family, case.shown, kind, elapsed_s, stage, -1 if code is None else code, message[-600:])


def outcomes_of(every: list[Case], jobs: int) -> Iterator[Outcome]:
    """Runs `jobs` cases at once."""
    config_s = import_s("lockstep.launch.start, lockstep.config.compose")
    cost_s = {"config": config_s, "torch": config_s + import_s("lockstep.build")}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
        forked.start_server(Path(name))
        folders = [Path(name, str(number)) for number in range(len(every))]
        yield from pool.map(tried, every, folders, [cost_s] * len(every))


# --- the table ---


def table(outcomes: list[Outcome]) -> str:
    rows = []
    refusable = [o for o in outcomes if o.verdict not in (WORKS, WRONGLY)]
    for family in [*dict.fromkeys(o.family for o in refusable), "all"]:
        own = [o for o in refusable if family in (o.family, "all")]
        counts = Counter(o.verdict for o in own)
        counts[WITH_TORCH] = sum(o.verdict == WELL and o.stage == "torch" for o in own)
        times = [o.elapsed_s for o in own]
        late = f"{statistics.quantiles(times, n=20, method='inclusive')[-1]:.1f}" if len(times) > 1 else ""
        rows.append([family, str(len(own)), *(str(counts[name]) for name in COLUMNS), late])
    return measuring.table(["family", "cases", *COLUMNS, "s, 95th percentile"], rows)


def page(outcomes: list[Outcome]) -> str:
    works = Counter(o.verdict for o in outcomes)
    bad = sorted((o for o in outcomes if o.verdict not in (WELL, WORKS)), key=lambda o: (o.verdict, o.family))
    rest = "\n".join(f"- {o.verdict}: `{o.name}`" for o in bad)
    must = f"Of {works[WORKS] + works[WRONGLY]} command lines that must work, {works[WORKS]} did."
    return f"{table(outcomes)}\n\n{must}\n\nNot rejected well:\n\n{rest or 'none'}\n"


def thinned(every: list[Case], step: int) -> list[Case]:
    made = [case for case in every if case.family.startswith(MADE)]
    left_out = {id(case) for place, case in enumerate(made) if place % step}
    return [case for case in every if id(case) not in left_out]


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose family or command line has this text")
    parser.add_argument("--every", type=int, default=1, help="take every n-th case of the families made from keys")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--save", type=Path, help="keep the verdicts")
    args = parser.parse_args()
    chosen = thinned([case for case in cases() if args.only in case.family or args.only in case.name], args.every)
    outcomes = []
    for outcome in outcomes_of(chosen, args.jobs):
        outcomes.append(outcome)
        if args.save:  # so an interrupted call keeps its outcomes
            args.save.write_text(json.dumps([asdict(each) for each in outcomes], indent=0))
        if args.only or outcome.verdict not in (WELL, WORKS):
            print(f"{outcome.verdict:20} {outcome.elapsed_s:5.1f} s  {outcome.name}", file=sys.stderr, flush=True)
    print(made_by())
    print(page(outcomes))
    return int(any(outcome.verdict not in (WELL, WORKS) for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
