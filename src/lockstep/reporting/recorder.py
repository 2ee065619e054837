"""Observes a training run and keeps its report up to date. Rank 0 writes."""

import logging
import math
import os
import shutil
import sys
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from lockstep.checkpoints.finding import found_in, step_of
from lockstep.config.compose import as_overrides
from lockstep.errors import UserError, outcome_of
from lockstep.machine import process
from lockstep.machine.files import write_text
from lockstep.machine.hardware import peak_bytes
from lockstep.reporting.console import Logs
from lockstep.run.folder import RunFolder
from lockstep.run.report import best_row, with_tested

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lockstep.reporting.loggers import Tracking
    from lockstep.reporting.page import RunInfo
    from lockstep.tasks.panel import Content


def from_callbacks(trainer: "pl.Trainer | None", method: str) -> list[Any]:
    """What the callbacks' `report_figures() -> dict` (on every rank) or `report_panels() -> list` (on rank 0) add to the report."""
    callbacks = trainer.callbacks if trainer else ()  # type: ignore[attr-defined]
    return [getattr(callback, method)() for callback in callbacks if hasattr(callback, method)]


class Recorder:
    """Keeps the status in the run's report up to date: running, then how it ended.

    `begin` writes the first files, after everything is built. A user's class that fails earlier leaves a report and a log, but
    no config.yaml, so the same command can be run again.

    Raises:
        UserError: the folder belongs to a different run.
    """

    def __init__(self, folder: RunFolder, config: DictConfig, report: dict[str, Any], rank: int) -> None:
        self.folder, self.config, self.rank = folder, config, rank
        self.report = {"status": "running", **report}
        self.began_s = time.perf_counter()
        self.trained_s: float | None = None  # perf_counter when training ended
        self.logs = Logs()
        self.tracking: Tracking | None = None
        self.earlier: dict[Path, str] = {}  # files of a resumed run, restored if the resume is rejected
        self.is_new = False
        self.resumed_at = 0  # steps done
        self.trainer: pl.Trainer | None = None
        self.module: pl.LightningModule | None = None
        self.panels: list[Content] = []  # of the test set
        self.was_validated = True

    def __enter__(self) -> "Recorder":
        process.trains = True
        return self

    def begin(self, trainer: "pl.Trainer", data: "pl.LightningDataModule", module: "pl.LightningModule") -> None:
        from lockstep.data.datamodule import facts

        self.trainer, self.module = trainer, module
        self.report |= facts(data)
        if self.rank == 0:
            self.open()
            from lockstep.reporting.loggers import Tracking

            plain: Any = OmegaConf.to_container(self.config, resolve=True)
            self.tracking = Tracking()
            self.tracking.begin(trainer.loggers, plain, self.report)

    def open(self) -> None:
        folder, resumed_from = self.folder, self.report["resumed_from"]
        folder.metrics()  # rejects what is no log before training appends to it
        self.make_folder()
        self.earlier = {file: file.read_text() for file in (folder.config_file, folder.report_file) if file.is_file()}
        if resumed_from:
            self.resumed_at = step_of(Path(resumed_from))
            if earlier := folder.report():
                self.report["started"] = earlier.get("started", self.report["started"])
                self.report["restarts"] = int(earlier.get("restarts") or 0) + 1
        elif folder.has_config():
            raise UserError(
                f"run={self.report['run']}: {folder.path} exists. Set resume=auto to continue it, or a different name."
            )
        folder.write_config(self.config)
        self.logs.open(folder.path)
        folder.write_report(self.report)

    def make_folder(self) -> None:
        self.is_new = self.folder.is_empty()
        self.folder.checkpoints.mkdir(parents=True, exist_ok=True)

    def add(self, **metrics: Any) -> None:
        """Adds the metrics of an evaluation to the report and the loggers. The last evaluation is the test."""
        assert self.trainer is not None
        self.report |= with_tested(metrics)
        if self.rank == 0 and self.folder.path.is_dir():
            self.folder.write_report(self.report)  # before its row: loggers.py drops what the report has
        for logger in self.trainer.loggers if self.rank == 0 else ():
            logger.log_metrics(metrics, self.report["train/steps"])

    def trained(self, checkpoint: str | None) -> None:
        """Adds the measurements of training. Call it on every rank."""
        import torch

        from lockstep.training.steps import steps_done

        trainer, monitor, unit = self.trainer, self.report["monitor"], self.report["unit"]
        assert trainer is not None
        batches = trainer.num_training_batches  # of an epoch; infinite where the dataloader has no length
        begun = math.ceil((trainer.fit_loop.total_batch_idx + 1) / batches) if 0 < batches < math.inf else None
        self.report |= {
            "train/steps": steps_done(trainer),
            "train/epochs": trainer.current_epoch if begun is None else begun,
            # null without the callback that measures them
            **dict.fromkeys((f"train/{unit}_per_s", "train/data_wait_share", "train/first_step_s")),
        }
        for measured in from_callbacks(trainer, "report_figures"):
            self.report |= measured
        self.trained_s = time.perf_counter()
        known_s = sum(value for name, value in self.report.items() if name.startswith("time/"))
        rate = self.report[f"train/{unit}_per_s"]
        flops, device = getattr(self.module, "flops_per_sample", None), trainer.strategy.root_device
        peak = peak_bytes(device)
        if peak is not None:  # of the process with the most
            peak = int(trainer.strategy.reduce(torch.tensor(float(peak), device=device), reduce_op="max"))
        rows = self.folder.metrics() if self.rank == 0 else []
        self.report |= {
            "time/start_s": max(0.0, self.trained_s - self.began_s - known_s),
            "train/flops_per_s": None if rate is None or flops is None else flops * rate,
            "peak_memory_bytes": peak,
            "parameters": sum(p.numel() for p in trainer.lightning_module.parameters()),
            "checkpoint": os.path.relpath(checkpoint, self.folder.path) if checkpoint else None,
            **best_row(rows, monitor, self.report["monitor_mode"]),
        }
        self.was_validated = not monitor or trainer.strategy.broadcast(monitor in self.report)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        process.trains = False
        outcome, has_begun, ended_s = outcome_of(error), bool(self.logs.handlers), time.perf_counter()
        is_refused = outcome.status == "refused" and not self.is_saved()
        status = "failed" if outcome.status == "refused" else outcome.status
        self.report |= {"status": status, "wall_s": ended_s - self.began_s}
        self.report |= {} if self.trained_s is None else {"time/test_s": ended_s - self.trained_s}
        self.report |= {} if outcome.error is None else {"error": outcome.error}
        if isinstance(error, Exception) and not outcome.is_explained:
            process.report_failure(self.rank)  # now, because the other processes wait for this one
        if self.rank != 0 or (not has_begun and (error is None or is_refused)):
            return
        if has_begun and not self.folder.path.is_dir():  # it was removed meanwhile
            return self.logs.close()
        if not has_begun:  # a user's class failed before the run began
            self.make_folder()
            self.logs.open(self.folder.path)
        if outcome.error:  # train.log gets the traceback of an unexpected error
            logging.getLogger("lockstep").info("%s", outcome.error, exc_info=None if outcome.is_explained else error)
        from lockstep.reporting.page import show_run, write_page

        panels = [*self.panels, *(panel for more in from_callbacks(self.trainer, "report_panels") for panel in more)]
        if not is_refused:
            self.folder.write_report(self.report)  # first, because a logger's server may take its time
            with suppress(*([Exception] if error else [])):  # the error that ended the run is what counts
                write_page(self.info, self.report, self.module, panels)
        if self.tracking:
            self.tracking.end(self.report, panels, self.folder)
        self.logs.close()
        if is_refused:  # a mistake found late: restore everything
            return self.undo()
        if error is None:
            if not self.folder.has_config():
                gone = f"{self.folder.config_file} was removed while the run was going on: eval.py needs it."
                print(f"WARNING: {gone}", file=sys.stderr)
            show_run(self.info, self.report, self.module)

    @cached_property
    def info(self) -> "RunInfo":
        from lockstep.reporting.page import RunInfo

        cfg = self.config
        config = OmegaConf.to_yaml(cfg, resolve=True)
        return RunInfo(str(cfg.run), str(cfg.runs_dir), as_overrides(cfg), config, bool(cfg.compile))

    def is_saved(self) -> bool:
        """Whether this start has trained steps, and a checkpoint is there."""
        from lockstep.training.steps import steps_done

        if self.trainer is None or self.trainer.lightning_module is None:
            return False
        return steps_done(self.trainer) > self.resumed_at and bool(found_in(self.folder.path))

    def undo(self) -> None:
        """Removes the files of a run that could not start, and restores what was there before."""
        if self.is_new:
            shutil.rmtree(self.folder.path)
            return
        for file in (self.folder.config_file, self.folder.report_file):
            if file in self.earlier:
                write_text(file, self.earlier[file])
            else:
                file.unlink(missing_ok=True)
