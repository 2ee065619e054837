"""Observes a training run and keeps its report up to date. Rank 0 writes it."""

import logging
import math
import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import lightning.pytorch as pl
import torch

from lockstep import ROOT, WHEEL
from lockstep.checkpoints.finding import checkpoint_paths, step_of
from lockstep.checkpoints.saving import best_checkpoint
from lockstep.config import project
from lockstep.config.checks import unused_overrides
from lockstep.config.draft import as_yaml
from lockstep.config.run_config import RunConfig
from lockstep.config.settings import Settings
from lockstep.errors import Outcome, UserError, outcome_of, raise_problems
from lockstep.machine import process
from lockstep.machine.files import make_folder, write_text
from lockstep.machine.world import peak_bytes
from lockstep.reporting.console import log_to_file, show_run
from lockstep.reporting.loggers import Background, end_run
from lockstep.run import SEPARATOR, RunFolder, provenance, validation_metrics_at
from lockstep.training.arithmetic import steps_done

log = logging.getLogger("lockstep")
# Writes the page of a run that is done or has failed, like write_page of extras/page.py.
Page = Callable[[RunFolder, RunConfig, dict[str, Any], pl.Trainer | None, Sequence[Any]], None]


def from_callbacks(trainer: pl.Trainer | None, method: str) -> list[Any]:
    """Results of the callbacks' `report_metrics() -> dict` (on every rank) or `report_panels() -> list` (on rank 0)."""
    callbacks = trainer.callbacks if trainer else ()  # type: ignore[attr-defined]
    return [getattr(callback, method)() for callback in callbacks if hasattr(callback, method)]


def first_report(settings: Settings) -> dict[str, Any]:
    """The content of report.json at the start of a run."""
    cfg, world = settings.cfg, settings.world
    return {
        "status": "running",
        "run": cfg.run,
        "task": settings.cfg.task.title,
        "strategy": cfg.strategy.name,
        "world_size": world.size,
        "accelerator": world.accelerator,
        "devices": world.devices,
        "nodes": world.nodes,
        "precision": str(cfg.trainer.precision),
        **settings.batches,
        "seed": cfg.seed,
        "monitor": cfg.checkpoint.monitor,
        "monitor_mode": cfg.checkpoint.mode,
        "data/name": settings.cfg.data.title,
        "resumed_from": cfg.resume,
        "overrides": None if settings.overrides is None else shlex.join(settings.overrides),
        "restarts": 0,
        **provenance(project.current().root or (None if WHEEL else ROOT)),
    }


class Recorder(pl.Callback):
    """Keeps the run's report up to date, from the status `running` to the final one.

    `begin` writes the first files, after everything is built. A run that fails before its first step leaves none.

    Raises:
        UserError: the folder belongs to a different run.
    """

    def __init__(self, settings: Settings, page: Page | None = None) -> None:
        self.settings, self.folder, self.config = settings, settings.folder, settings.cfg
        self.rank = settings.world.rank
        self.report, self.page = first_report(settings), page
        self.began_s = time.perf_counter()
        self.trained_s: float | None = None  # perf_counter at the end of training
        self.closes_log = ExitStack()
        self.backgrounds: list[Background] = []  # on rank 0: loggers besides metrics.csv
        self.restore: Callable[[], None] | None = None  # restores the folder to its state at the start of the run
        self.resumed_at = 0  # steps done before this start
        self.was_done = False  # before this start
        self.trainer: pl.Trainer | None = None
        # Evaluations after training. Includes a validation if the checkpoint to test has not been validated.
        self.stages: list[str] = []
        self.was_validated = True
        self.checkpoint_step = 0  # step of the tested checkpoint

    def __enter__(self) -> "Recorder":
        process.trains = True
        return self

    def begin(self, trainer: pl.Trainer) -> None:
        """Writes the first files of the run that `trainer` trains."""
        self.trainer = trainer
        raise_problems(unused_overrides(self.settings))
        settings = self.settings.as_built()
        self.config = settings.cfg
        summary = next(each for each in trainer.callbacks if type(each).__name__ == "RunSummary")  # type: ignore[attr-defined]
        self.report |= {"model": summary.model, **summary.data_info}
        if self.rank == 0:
            self.open()
            names = [name for name in self.config.logger if name != "csv"]
            named = zip(names, trainer.loggers[:-1], strict=True)  # the last is metrics.csv
            self.backgrounds = [Background(logger, name, self.config, self.report) for name, logger in named]
            trainer.callbacks.append(self)  # type: ignore[attr-defined]

    def open(self) -> None:
        folder, resumed_from = self.folder, self.report["resumed_from"]
        folder.metrics()  # rejects an invalid metrics.csv before training appends to it
        if resumed_from:
            self.resumed_at = step_of(Path(resumed_from))
            if previous := folder.report():
                self.report["started"] = previous.get("started", self.report["started"])
                self.report["restarts"] = int(previous.get("restarts") or 0) + 1
                self.was_done = previous.get("status") == "done"
        elif folder.has_config():
            raise UserError(f"{folder.path} exists. Set resume=auto to continue it, or run=<new name>.")
        self.restore = folder.snapshot_restorer()
        folder.path.mkdir(parents=True, exist_ok=True)
        make_folder(folder.checkpoints)
        self.closes_log.enter_context(log_to_file(folder.log_file))
        write_text(folder.config_file, as_yaml(self.config.replace({"resume": None})))
        folder.write_report(self.report)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if steps := steps_done(trainer):
            self.folder.truncate_logs(steps)  # a resumed run writes no row twice

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Creates the loggers' runs after the first step: a run that fails before it leaves nothing on a server."""
        for background in self.backgrounds if steps_done(trainer) else ():
            background.start()

    def add(self, **metrics: Any) -> None:
        """Adds metrics to the report and the loggers: of a validation if training had none, then of the test."""
        assert self.trainer is not None
        is_test, self.was_validated = self.was_validated, True
        self.report |= metrics | ({"evaluated": SEPARATOR.join(metrics)} if is_test else {})
        if self.rank == 0:
            if is_test and self.report["resumed_from"]:
                self.folder.drop_tests(metrics)
            for logger in self.trainer.loggers:
                logger.log_metrics(metrics, self.report["train/steps"] if is_test else self.checkpoint_step)
            self.folder.write_report(self.report)

    def trained(self) -> str | None:
        """Adds the measurements of training. Returns the checkpoint to test, if any. Call it on every rank."""
        trainer, report = self.trainer, self.report
        assert trainer is not None
        for background in self.backgrounds:
            background.start()  # if there was no step left to train
        checkpoint = best_checkpoint(trainer)
        monitor, rate = report["monitor"], f"train/{report['unit']}_per_s"
        self.checkpoint_step = step_of(Path(checkpoint)) if checkpoint else steps_done(trainer)
        batches = trainer.num_training_batches  # per epoch; infinite if the dataloader has no length
        is_known = 0 < batches < math.inf
        epochs = math.ceil((trainer.fit_loop.total_batch_idx + 1) / batches) if is_known else trainer.current_epoch
        report |= {"train/steps": steps_done(trainer), "train/epochs": epochs}
        # None without the callback that measures them
        report |= dict.fromkeys((rate, "train/flops_per_s", "train/data_wait_share", "train/first_step_s"))
        for metrics in from_callbacks(trainer, "report_metrics"):
            report |= metrics
        self.trained_s = time.perf_counter()
        known_s = sum(value for name, value in report.items() if name.startswith("time/"))
        device = trainer.strategy.root_device
        peak = peak_bytes(device)
        if peak is not None:  # the maximum of all processes
            peak = int(trainer.strategy.reduce(torch.tensor(float(peak), device=device), reduce_op="max"))
        rows = self.folder.metrics() if self.rank == 0 else ()
        report |= {
            "time/start_s": max(0.0, self.trained_s - self.began_s - known_s),
            "peak_memory_bytes": peak,
            "parameters": sum(p.numel() for p in trainer.lightning_module.parameters()),
            "checkpoint": os.path.relpath(checkpoint, self.folder.path) if checkpoint else None,
            **trainer.strategy.means.marked(validation_metrics_at(rows, self.checkpoint_step, monitor)),  # type: ignore[attr-defined]
        }
        self.was_validated = not monitor or trainer.strategy.broadcast(monitor in report)
        self.stages = ["test"] if self.was_validated else ["val", "test"]
        return checkpoint

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        process.trains, ended_s, outcome = False, time.perf_counter(), outcome_of(error)
        status = "failed" if outcome.status == "refused" else outcome.status
        self.report |= {"status": status, "wall_s": ended_s - self.began_s}
        if self.trained_s is not None:
            self.report["time/test_s"] = ended_s - self.trained_s
        if outcome.error is not None:
            self.report["error"] = outcome.error
        if isinstance(error, Exception) and not outcome.is_explained:
            process.report_failure(self.rank)  # now, because the other processes are waiting for this one
        if self.restore is None:  # not begun, or not rank 0
            return
        keeps = self.keeps(outcome)
        with self.closes_log:  # closes the log at the end
            if not self.folder.path.is_dir():  # removed meanwhile
                return
            if outcome.error:  # train.log gets the traceback of an unexpected error
                log.info("%s", outcome.error, exc_info=None if outcome.is_explained else error)
            self.finish(error, keeps=keeps)
        if not keeps:
            self.restore()

    def keeps(self, outcome: Outcome) -> bool:
        """Whether this start added something to the run; otherwise the folder is restored."""
        if outcome.status == "refused" or (outcome.status == "failed" and self.was_done):
            # without a new checkpoint, a finished run keeps its report, and the checkpoint that it names
            return any(step_of(path) > self.resumed_at for path in checkpoint_paths(self.folder.path))
        has_begun = self.trainer is not None and self.trainer.lightning_module and steps_done(self.trainer)
        return outcome.status == "done" or bool(has_begun or self.report["resumed_from"])

    def finish(self, error: BaseException | None, keeps: bool) -> None:
        """Writes the report and its page, ends the loggers, and prints the result."""
        panels = [*chain.from_iterable(from_callbacks(self.trainer, "report_panels"))]
        if keeps:
            with suppress(*([Exception] if error else [])):  # the error that ended the run matters more
                if self.page:
                    self.page(self.folder, self.config, self.report, self.trainer, panels)
            self.folder.write_report(self.report)  # now, because a logger's server may be slow
        end_run(self.backgrounds, self.folder, self.report, panels)
        if error is None and self.trainer is not None:
            show_run(self.folder, self.config, self.report, self.trainer.lightning_module)
