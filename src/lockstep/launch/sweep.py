"""A multirun's table of results, read from the reports that its jobs left."""

import csv
import json
import time
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from lockstep.report import write_json

COLUMNS = ("status", "test/acc", "test/loss", "val/acc", "train/steps", "train/images_per_s", "wall_s")


class SweepTable(Callback):
    """Records a job that failed before it had a report; prints and saves the table at the end."""

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        self.began_s = time.time()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        if OmegaConf.is_missing(config.hydra.job, "num"):
            return  # a single run
        path = Path(config.hydra.sweep.dir) / str(config.hydra.job.num) / "report.json"
        overrides = {"overrides": " ".join(config.hydra.overrides.task)}
        if path.is_file() and path.stat().st_mtime > self.began_s:
            write_json(path, json.loads(path.read_text()) | overrides)
        elif not path.is_file() and job_return.status is not JobStatus.COMPLETED:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"status": "failed", **overrides})

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
            writer.writerows(rows)
        from lockstep.console import sweep_table

        sweep_table(rows, COLUMNS, sweep_dir / "results.csv")
