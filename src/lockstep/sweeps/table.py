"""A multirun's table of results, read from the reports of its jobs."""

import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lockstep.config.run_files import read_report
from lockstep.machine.files import write_csv, write_json
from lockstep.reporting.report_file import evaluated, status

INNER = ("+callbacks.pruning.", "run=", "resume=")  # overrides that Lockstep adds to those of a job
REPEATS = ("seed=", "data.fold=")  # jobs that differ by these alone repeat one experiment
FIRST, LAST = ("status",), ("train/steps", "wall_s")
last: list[dict[str, Any]] = []  # the rows of the last multirun of this process, for lockstep.sweep


def named(cfg: DictConfig, hydra_cfg: DictConfig) -> DictConfig:
    """The config of a multirun's job. Its run directory is inside the multirun's, unless the sweep is over `run` itself."""
    sweep_dir = Path(hydra_cfg.sweep.dir)
    name = str(sweep_dir.relative_to(cfg.runs_dir))
    if cfg.run is None or str(cfg.run) == name:
        cfg.run = f"{name}/{hydra_cfg.job.num}"
    return cfg


def columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Status, test figures, the monitored figure, speed and time."""
    tested = [key for row in rows for key in evaluated(row) if not key.endswith("/count")]
    monitored = [str(row["monitor"]) for row in rows if row.get("monitor")]
    rates = [key for row in rows for key in row if key.endswith("_per_s") and key != "train/flops_per_s"]
    return list(dict.fromkeys([*FIRST, *sorted(tested), *monitored, LAST[0], *rates, LAST[1]]))


def typed(overrides: list[str]) -> list[str]:
    """The overrides that the user typed for a job."""
    return [o for o in overrides if not o.startswith(INNER)]


def record(folder: Path, overrides: list[str], *, failed: bool) -> None:
    """Adds a job's overrides to its report; a job that failed before it had one gets one."""
    path = folder / "report.json"
    folder.mkdir(parents=True, exist_ok=True)
    report = {"status": "failed"} | read_report(folder)
    if failed and report["status"] in ("done", "running"):
        return  # the report belongs to another run, which kept its directory
    write_json(path, report | {"overrides": shlex.join(typed(overrides))})


def spread(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and sample standard deviation of the figures of finished jobs that differ by nothing but what REPEATS names."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        typed = [o for o in shlex.split(str(row.get("overrides", ""))) if not o.startswith(REPEATS)]
        if row["status"] == "done":
            groups.setdefault(shlex.join(typed), []).append(row)
    found = []
    for own, jobs in groups.items():
        figures: dict[str, list[Any]] = {key: [row.get(key) for row in jobs] for key in columns(jobs)}
        numbers = {key: v for key, v in figures.items() if all(type(each) in (int, float) for each in v)}
        for name, of in (("mean", statistics.fmean), ("deviation", statistics.stdev)) if len(jobs) > 1 else ():
            of_jobs = {key: of(values) for key, values in numbers.items()}
            found.append({"run": f"{name} of {len(jobs)}", "overrides": own, **of_jobs})
    return found


class SweepTable(Callback):
    """Prints and saves a multirun's table at the end, with mean and spread over seeds and folds."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        sweep_dir = Path(config.hydra.sweep.dir)
        reports = sorted(
            sweep_dir.glob("*/report.json"),
            key=lambda path: int(path.parent.name) if path.parent.name.isdigit() else -1,
        )
        rows = []
        for folder in (path.parent for path in reports):
            report = {"run": f"{sweep_dir.name}/{folder.name}", **read_report(folder)}
            rows.append(report | {"status": status(folder, report)})
        last[:] = rows
        if not rows:
            return
        names, repeated = columns(rows), spread(rows)
        write_csv(sweep_dir / "results.csv", ["run", "overrides", *names], rows)
        if repeated:
            write_csv(sweep_dir / "spread.csv", ["run", "overrides", *names[1:]], repeated)
        from lockstep.reporting.console import sweep_table

        sweep_table(rows, repeated, names, sweep_dir / "results.csv")
