"""The jobs of a multirun in parallel on one machine, and the table of their results."""

import os
import shlex
import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from rich.table import Table

from lockstep.config.compose import expand_sweep, key_of, recorded_overrides
from lockstep.config.draft import Draft
from lockstep.config.formatting import inline, number, pluralize
from lockstep.config.run_config import Component
from lockstep.errors import RunFailed, UserError
from lockstep.launch import local
from lockstep.machine import process
from lockstep.machine.files import open_log, write_csv
from lockstep.machine.system import cores
from lockstep.machine.world import visible_gpus, world_of
from lockstep.reporting import console
from lockstep.reporting.report import Report
from lockstep.run import RunFolder, metrics_of_test, overrides_of

# --- A multirun's table of results, read from the reports of its jobs ---

REPEATS = ("seed=", "loader.fold=")  # jobs that differ only in these repeat one experiment
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


def columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Status, the monitored metric, test metrics, steps, speed and time: a narrow terminal shows the first ones."""
    test_metrics = [key for row in rows for key in metrics_of_test(row) if not key.endswith("/count")]
    monitored = [str(row["monitor"]) for row in rows if row.get("monitor")]
    rates = [key for row in rows for key in row if key.endswith("_per_s") and key != "train/flops_per_s"]
    return list(dict.fromkeys(["status", *monitored, *sorted(test_metrics), "train/steps", *rates, "wall_s"]))


def record_failure(folder: RunFolder, overrides: list[str]) -> None:
    """Creates a report for a job that failed before it wrote one."""
    if not folder.has_config():
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.write_report({"status": "failed", "overrides": shlex.join(recorded_overrides(overrides))})


def spread(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and sample standard deviation of the metrics of finished jobs that differ only in the keys of REPEATS."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["status"] == "done":
            shared = [o for o in overrides_of(row) or () if not o.startswith(REPEATS)]
            groups.setdefault(shlex.join(shared), []).append(row)
    summaries = []
    for overrides, jobs in groups.items():
        metrics: dict[str, list[Any]] = {key: [row.get(key) for row in jobs] for key in columns(jobs)}
        numbers = {key: values for key, values in metrics.items() if all(type(v) in (int, float) for v in values)}
        for name, function in (("mean", statistics.fmean), ("deviation", statistics.stdev)) if len(jobs) > 1 else ():
            results = {key: function(values) for key, values in numbers.items()}
            summaries.append({"run": f"{name} of {len(jobs)}", "overrides": overrides, **results})
    return summaries


def differences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For each job, the overrides that not all jobs share, as one string."""
    by_job = [overrides_of(row) or () for row in rows]
    shared = set[str].intersection(*map(set, by_job))
    return [shlex.join(o for o in overrides if o not in shared) for overrides in by_job]


def print_table(rows: Sequence[dict[str, Any]], repeated: Sequence[dict[str, Any]], path: Path) -> None:
    """Prints the jobs of a multirun, then mean and spread of repeated jobs. A narrow terminal gets fewer columns."""
    names, lines = columns(rows), [*rows, *repeated]

    def table() -> Table:
        table = Table("run", "with", *map(inline, names))
        for index, (row, difference) in enumerate(zip(lines, differences(lines), strict=True), 1):
            cells = [str(row["run"]), difference, *(number(row.get(name)) for name in names)]
            table.add_row(*map(inline, cells), end_section=index == len(rows))
        return table

    out, any_width = console.out, console.out.options.update(max_width=1000)
    while out.file.isatty() and len(names) > 2 and out.measure(table(), options=any_width).maximum > out.width:
        names.pop()
    console.print_wide(table(), f"done: {pluralize(len(rows), 'run')}; all columns are in")
    out.print(inline(path), soft_wrap=True)


def write_table(sweep_dir: Path) -> None:
    """Prints and saves the table of a multirun, with mean and spread over seeds and folds."""
    folders = [path.parent for path in sweep_dir.glob("*/report.json")]
    folders.sort(key=lambda folder: int(folder.name) if folder.name.isdigit() else -1)
    rows = last[:] = [Report.listed(RunFolder(job_folder), sweep_dir.parent) for job_folder in folders]
    if not rows:
        return
    names, repeated = columns(rows), spread(rows)
    write_csv(sweep_dir / "results.csv", ["run", "overrides", *names], rows)
    if repeated:
        write_csv(sweep_dir / "spread.csv", ["run", "overrides", *names[1:]], repeated)
    print_table(rows, repeated, sweep_dir / "results.csv")


# --- Jobs of a multirun in parallel on one machine: assigns devices and starts a process per job ---


def environments(draft: Draft, jobs: int | str) -> list[dict[str, str]]:
    """One environment per parallel job: its GPUs, or its fraction of the cores.

    Raises:
        UserError: `jobs` is invalid, or needs more GPUs than there are.
    """
    limits = [draft.get(f"trainer.{key}") for key in ("accelerator", "devices", "num_nodes")]
    strategy = Component.of(draft.group("strategy"))
    world = world_of(strategy.target, strategy.name, *limits)
    gpus = visible_gpus()
    on_gpus, per_job = world.accelerator == "cuda", world.devices
    available = len(gpus) if on_gpus else cores()
    most = available // per_job
    count = max(1, most) if jobs == "auto" else jobs
    if not isinstance(count, int) or count < 1 or (on_gpus and count > most):
        room = f"This machine has room for {pluralize(most, 'job')} of {pluralize(per_job, 'device')}"
        raise UserError(f"hydra.launcher.jobs={jobs} is invalid; expected auto, or a number of at least 1. {room}.")
    if not on_gpus:
        return [{"OMP_NUM_THREADS": str(max(1, available // count // per_job))}] * count
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * per_job : (i + 1) * per_job])} for i in range(count)]


def run_in_subprocess(script: Path, draft: Draft, overrides: list[str], slot: dict[str, str]) -> JobReturn:
    """Runs `script` for one job and waits; not after a warning signal. A killed process gets a report too."""
    result = JobReturn(overrides=overrides, cfg=draft.tree, status=JobStatus.FAILED)
    if process.received:
        result.return_value = RunFailed(f"{draft.run} was not started")
        return result
    folder = draft.folder
    output = folder.path.with_name(f"{folder.path.name}.log")
    device = f" on GPU {slot['CUDA_VISIBLE_DEVICES']}" if "CUDA_VISIBLE_DEVICES" in slot else ""
    # One write with the newline, because several threads print.
    print(f"{draft.run} begins{device}: {inline(' '.join(recorded_overrides(overrides)))}\n", end="", flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    # Hide the SLURM job that contains all jobs: the launcher requeues it.
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | slot
    handover = local.Handover(draft, overrides)
    # In a new session, so that the terminal's Ctrl-C reaches it only through the launcher.
    with (
        open_log(output) as log,
        local.spawn(script, env, handover, stdout=log, stderr=log, start_new_session=True) as child,
    ):
        local.wait([child])
        child.kill()  # if it is still running
        code = child.wait()
    if code:
        folder.record_end(RunFailed(f"its process ended with exit code {code}", code))
        record_failure(folder, overrides)
    report = folder.report()
    print(f"{draft.run} {report.get('status')}\n", end="", flush=True)
    result.status = JobStatus.FAILED if code else JobStatus.COMPLETED
    result.return_value = RunFailed(f"{draft.run} failed; see {output}", 2 if code == 2 else 1) if code else report
    return result
