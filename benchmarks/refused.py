"""Tries command lines and files that cannot work, and counts how they are refused.

python benchmarks/refused.py [--only <text>] [--every 3] [--jobs 2] [--before <file>] [--save <file>] [--out docs/measurements/refused.md]

A case is refused well if train.py ends with exit code 2 and messages that name the key, without a traceback, before the run's
directory is made, and leaves no file. Some of these need torch: whether a network takes the images is known once it is made. Each case is a process forked from one that has imported torch, as imports would take most of the time;
the table adds the time that they take to the cases that need them. The cases are in refused_cases.py. `--save` keeps the
verdicts; `--before` compares with kept ones. Needs Linux.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from refused_cases import cases
from refused_files import Case
from refused_run import DIM, LATE, LEFT, SILENT, TRACEBACK, WELL, WORKS, WRONGLY, Outcome, tried

from lockstep.machine.world import cores
from lockstep.run.report import versions

MADE = ("a wrong value", "a key is", "a name is misspelt")  # families made from the schema's keys
WITH_TORCH = "of these with torch"
COLUMNS = (WELL, WITH_TORCH, LATE, DIM, LEFT, TRACEBACK, SILENT)


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
    import lockstep.training.oom  # noqa: F401


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
        counts[WITH_TORCH] = sum(o.verdict == WELL and o.stage == "torch" for o in own)
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


def page(now: list[Outcome], before: list[Outcome], command: str = "python benchmarks/refused.py") -> str:
    text = __doc__.split("\n\n", 2)[2]
    made = (
        f"Made by `{command}` with {versions()}, on {cores()} CPU cores that others used as well: read times with care."
    )
    parts = [f"# What is refused, and how\n\n{made}\n\n{text}"]
    parts += [f"## Now\n\n{table(now)}\nNot refused well:\n\n{rest(now) or 'none'}\n"]
    same = [outcome for outcome in before if outcome.name in {each.name for each in now}]
    said = "Those of these cases that an earlier version was tried with, as it answered."
    parts += [f"## Before\n\n{said}\n\n{table(same)}"] if same else []
    return "\n".join(parts)


def load(path: Path | None) -> list[Outcome]:
    return [Outcome(**each) for each in json.loads(path.read_text())] if path else []


def thinned(every: list[Case], step: int) -> list[Case]:
    made = [case for case in every if case.family.startswith(MADE)]
    left_out = {id(case) for place, case in enumerate(made) if place % step}
    return [case for case in every if id(case) not in left_out]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose family or command line has this text")
    parser.add_argument("--every", type=int, default=1, help="take every n-th case of the families made from keys")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--before", type=Path, help="verdicts of an earlier call")
    parser.add_argument("--skip", type=Path, help="leave out the cases of these verdicts")
    parser.add_argument("--save", type=Path, help="keep the verdicts")
    parser.add_argument("--out", type=Path, help="write the page there as well")
    args = parser.parse_args()
    config_s = import_s("lockstep.launch.start, lockstep.config.compose")
    cost = {"config": config_s, "torch": config_s + import_s("lockstep.build")}
    preload()
    chosen = thinned([case for case in cases() if args.only in case.family or args.only in case.name], args.every)
    known = {outcome.name for outcome in load(args.skip)}
    chosen = [case for case in chosen if case.shown not in known]
    outcomes = []
    for outcome in tried(chosen, args.jobs, cost):
        outcomes.append(outcome)
        if args.save:  # a call that is cut off keeps what it has
            args.save.write_text(json.dumps([asdict(each) for each in outcomes], indent=0))
        if args.only or outcome.verdict not in (WELL, WORKS):
            print(f"{outcome.verdict:20} {outcome.elapsed_s:5.1f} s  {outcome.name}", file=sys.stderr, flush=True)
    every = f" --every {args.every}" if args.every > 1 else ""
    text = page(outcomes, load(args.before), f"python benchmarks/refused.py{every}")
    print(text)
    if args.out:
        args.out.write_text(text)
    return int(any(outcome.verdict not in (WELL, WORKS) for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
