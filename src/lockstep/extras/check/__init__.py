"""`lockstep check`: whether the ways of running a command agree, measured with real processes over a few steps."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import RunFailed, UserError


@dataclass(frozen=True)
class Result:
    """What the ways of running showed."""

    ways: list[dict[str, Any]]  # of compare.Difference
    notes: list[str]
    steps: list[int]  # that the command had, at most as many as were asked for
    device: str
    precision: str
    facts: dict[str, Any]  # what the result is about


def measure(overrides: Sequence[str], *, steps: int = 5, start: str | None = None) -> Result:
    """Runs the ways and compares them. Only in a process that has no threads and has not used a GPU: it forks.

    Raises:
        UserError: the command is invalid.
        RunFailed: it fails in one process.
    """
    from lockstep.config.checks import resolve

    cfg = resolve(overrides)  # before the imports, which take seconds
    from lockstep import build  # noqa: F401  # before the processes are forked
    from lockstep.checkpoints.finding import step_of, tested_checkpoint
    from lockstep.extras import page  # noqa: F401
    from lockstep.extras.check.ways import ONE, Check, ways

    resume = tested_checkpoint(start, "from", cfg.runs_dir) if start else None
    begin = step_of(resume) if resume else 0
    with tempfile.TemporaryDirectory(prefix="lockstep-check-") as folder:
        for precision in dict.fromkeys(["64-true", str(cfg.trainer.precision)]):
            run, every = Check(Path(folder, precision), overrides, cfg, resume, begin, steps), ways(cfg, precision)
            codes = run.run(every[:1])
            if not codes[ONE] and run.run_folder(ONE).exists():
                run.peak_bytes = run.outcome(ONE).ranks[0]["peak_bytes"]
                return result(run, every, codes | run.run(every[1:]))
        if codes[ONE] in (0, 2):  # 0: it had nothing to do, such as a run that is already finished
            raise UserError(*run.problems(every[0]))
        print(run.log(every[0]), file=sys.stderr)
        raise RunFailed(f"{ONE} failed", codes[ONE])


def result(run: Any, every: Sequence[Any], codes: dict[str, int]) -> Result:
    from lockstep.extras.check import compare, ways

    found, outcomes = dict[str, compare.Difference](), {way.name: run.outcome(way.name) for way in every}
    recorded = [*(name for name, each in outcomes.items() if each.ranks), ways.KILLED, ways.EVALUATION]
    for way in (way for way in every if way.name not in ways.NOT_SHOWN):
        needed = [each for each in every if each.name in (way.against, way.after, way.name)]
        if failed := [each for each in needed if codes[each.name] or each.name not in recorded]:
            verdict = {0: compare.NOT_RUN, 2: compare.REFUSED}.get(codes[failed[0].name], compare.FAILED)
            found[way.name] = compare.found(way.name, verdict, note="; ".join(run.problems(failed[0])))
        else:
            found[way.name] = compare.difference(way.name, outcomes[way.against], outcomes[way.name])
    late = [way for way in every if found.get(way.name, {}).get("step", 0) > run.start + 1]
    if late:  # once more, to record the layers of that step
        again = replace(run, folder=run.folder / "again", traced=min(found[way.name]["step"] for way in late))
        failed_again = again.run([way for way in every if way in late or way.name in ways.NOT_SHOWN])
        for way in late if not any(failed_again.values()) else ():
            found[way.name] = compare.difference(way.name, again.outcome(way.against), again.outcome(way.name))
    first = outcomes[ways.ONE].ranks[0]
    resumed = outcomes[ways.RESUMED].ranks[0] if ways.RESUMED in recorded else first
    then, now = first.get("attributes", {}), resumed.get("attributes", {})
    lost = sorted(name for name, was in then.items() if now.get(name, was) != was)
    notes = [f"{name} changes in training and is in no state_dict: a resume does not restore it" for name in lost]
    steps = [*outcomes[ways.ONE].steps][: None if first["precision"] == "64-true" else compare.FEW]
    return Result([*found.values()], notes, steps, first["device"], first["precision"], first["facts"])
