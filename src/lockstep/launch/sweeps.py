"""The jobs of a multirun: their names, and what their folders already contain. extras/sweeps.py runs them in parallel and tabulates them."""

import shlex
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from lockstep.config.compose import expand_sweep, key_of, recorded_overrides
from lockstep.config.draft import Draft
from lockstep.run import RunFolder, overrides_of

last: list[dict[str, Any]] = []  # the rows of the last multirun of this process, for lockstep.sweep


def job_draft(draft: Draft, sweep_dir: str, number: int) -> Draft:
    """The config of a job of a multirun. Its folder is inside the multirun's, unless the sweep is over `run` itself."""
    name = str(Path(sweep_dir).relative_to(draft.runs_dir))
    return draft.replace({"run": f"{name}/{number}"}) if draft.run is None or str(draft.run) == name else draft


def numbering_problems(folder: Path, overrides: Sequence[str]) -> Iterator[str]:
    """An error if a job of the grid `overrides` has the number of a job in `folder` that ran with different values."""
    grid = [values for override in overrides if len(values := expand_sweep(override)) > 1]
    varied = {key_of(values[0]) for values in grid}
    for index, new in enumerate(product(*grid)):
        job = RunFolder(folder / str(index))
        previous = [o for o in overrides_of(job.report()) or () if key_of(o) in varied]
        if job.has_config() and {*previous} != {*new}:
            change = f"ran with {shlex.join(previous)}, but would now run with {shlex.join(new)}"
            advice = "Set run=<new name>. To extend a sweep, add values only at the end of its first list."
            yield f"run={folder.name}: job {index} of this sweep {change}. {advice}"
            return


def record_failure(folder: RunFolder, overrides: list[str]) -> None:
    """Creates a report for a job that failed before it wrote one."""
    if not folder.has_config():
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.write_report({"status": "failed", "overrides": shlex.join(recorded_overrides(overrides))})
