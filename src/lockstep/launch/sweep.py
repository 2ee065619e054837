"""A multirun's table of results, read from the reports that its jobs left."""

import csv
import json
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

COLUMNS = ("status", "test/acc", "test/loss", "val/acc", "train/steps", "train/images_per_s", "wall_s")


class SweepTable(Callback):
    """Records a job that failed before it had a report; prints and saves the table at the end."""

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        if OmegaConf.select(config, "hydra.mode") is None or "num" not in config.hydra.job:
            return
        if OmegaConf.is_missing(config.hydra.job, "num"):
            return
        job_dir = Path(config.hydra.sweep.dir) / str(config.hydra.job.num)
        job_dir.mkdir(parents=True, exist_ok=True)
        path = job_dir / "report.json"
        report = json.loads(path.read_text()) if path.is_file() else {}
        if job_return.status is not JobStatus.COMPLETED and report.get("status") != "failed":
            report |= {"status": "failed"}
        report["overrides"] = list(config.hydra.overrides.task)
        path.write_text(json.dumps(report, indent=1) + "\n")

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        sweep_dir = Path(config.hydra.sweep.dir)
        reports = sorted(
            sweep_dir.glob("*/report.json"),
            key=lambda path: int(path.parent.name) if path.parent.name.isdigit() else -1,
        )
        rows = [{"run": f"{sweep_dir.name}/{path.parent.name}", **json.loads(path.read_text())} for path in reports]
        if not rows:
            return
        with (sweep_dir / "results.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["run", "overrides", *COLUMNS], extrasaction="ignore")
            writer.writeheader()
            writer.writerows({**row, "overrides": " ".join(row.get("overrides", []))} for row in rows)
        from lockstep.console import sweep_table

        sweep_table(rows, COLUMNS, sweep_dir / "results.csv")
