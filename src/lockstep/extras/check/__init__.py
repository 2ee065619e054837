"""`lockstep check`: whether the ways of running a command agree, measured with real processes over a few steps."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import RunFailed, UserError


@dataclass(frozen=True)
class Result:
    """What the ways of running showed."""

    ways: list[dict[str, Any]]  # of compare.Difference
    notes: list[str]
    steps: int  # that the command had, at most those that were asked for
    device: str
    precision: str


def measure(overrides: Sequence[str], *, steps: int = 5, start: str | None = None) -> Result:
    """Runs the ways and compares them. Only in a process that has no threads and has not used a GPU: it forks.

    Raises:
        UserError: the command is invalid.
        RunFailed: it fails in one process.
    """
    from lockstep import build  # noqa: F401  # before the processes are forked
    from lockstep.checkpoints.finding import step_of, tested_checkpoint
    from lockstep.config.checks import resolve
    from lockstep.extras import page  # noqa: F401
    from lockstep.extras.check.ways import Check, ways

    cfg = resolve(overrides)
    resume = tested_checkpoint(start, "from", cfg.runs_dir) if start else None
    begin = step_of(resume) if resume else 0
    with tempfile.TemporaryDirectory(prefix="lockstep-check-") as folder:
        for precision in dict.fromkeys(["64-true", str(cfg.trainer.precision)]):
            run, every = Check(Path(folder, precision), overrides, cfg, resume, begin, steps), ways(cfg, precision)
            run.folder.mkdir()
            codes = run.run(every[:2])
            if not any(codes.values()):
                if not run.run_folder(every[0].name).exists():  # such as a run that is already finished
                    raise UserError(*run.problems(every[0]))
                return compared(run, every, codes | run.run(every[2:]))
        failed = next(way for way in every if codes[way.name])
        if codes[failed.name] == 2:
            raise UserError(*run.problems(failed))
        raise RunFailed(run.log(failed), codes[failed.name])


def compared(run: Any, every: Sequence[Any], codes: dict[str, int]) -> Result:
    from lockstep.extras.check import compare, ways

    records = run.folder / "records"
    outcomes = {way.name: compare.Outcome(run.run_folder(way.name), records / way.folder) for way in every}
    found = list[compare.Difference]()
    stopped = {way.name for way in every if not outcomes[way.name].ranks} - {ways.KILLED, ways.EVALUATION}
    for way in (way for way in every if way.name not in ways.NOT_SHOWN):
        needed = (way.against, way.after, way.name)
        if failed := [each for each in every if each.name in needed and (codes[each.name] or each.name in stopped)]:
            verdict = {0: compare.NOT_RUN, 2: compare.REFUSED}.get(codes[failed[0].name], compare.FAILED)
            found.append(compare.found(way.name, verdict, note="; ".join(run.problems(failed[0]))))
        else:
            found.append(compare.difference(way.name, outcomes[way.against], outcomes[way.name]))
    then, now = (next(iter(outcomes[name].ranks), {}).get("attributes", {}) for name in (ways.ONE, ways.RESUMED))
    lost = sorted(name for name in then.keys() & now.keys() if now[name] != then[name])
    notes = [f"{name} changes in training and is in no state_dict: a resume does not restore it" for name in lost]
    first, steps = outcomes[ways.ONE].ranks[0], len(outcomes[ways.ONE].steps)
    return Result(found, notes, steps, first["device"], first["precision"])
