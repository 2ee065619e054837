"""A multirun's table of results, read from the reports of its jobs."""

import csv
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lockstep.machine.files import read_json, write_json
from lockstep.reporting.recorder import evaluated

INNER = ("+callbacks.pruning.", "run=", "resume=")  # overrides that Lockstep adds to those of a job
FIRST, LAST = ("status",), ("train/steps", "wall_s")


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
    report = read_json(path) if path.is_file() else {"status": "failed"}
    if failed and report["status"] in ("done", "running"):
        return  # the report belongs to another run, which kept its directory
    write_json(path, report | {"overrides": shlex.join(typed(overrides))})


class SweepTable(Callback):
    """Prints and saves a multirun's table at the end."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        sweep_dir = Path(config.hydra.sweep.dir)
        reports = sorted(
            sweep_dir.glob("*/report.json"),
            key=lambda path: int(path.parent.name) if path.parent.name.isdigit() else -1,
        )
        rows = [{"run": f"{sweep_dir.name}/{path.parent.name}", **read_json(path)} for path in reports]
        if not rows:
            return
        with (sweep_dir / "results.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["run", "overrides", *columns(rows)], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        from lockstep.reporting.console import sweep_table

        sweep_table(rows, columns(rows), sweep_dir / "results.csv")
