"""A run's files: config.yaml, train.log, report.json and report.html, written by rank 0."""

import logging
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from lockstep import ROOT, WHEEL
from lockstep.checkpoints.finding import found_in, step_of
from lockstep.config import project
from lockstep.config.batches import batches
from lockstep.config.compose import as_overrides
from lockstep.config.identity import model_title, run_dir, title
from lockstep.config.run_files import read_metrics, read_report
from lockstep.errors import TrainingFailed, UserError
from lockstep.machine import files, process
from lockstep.machine.files import write_json, write_text
from lockstep.machine.world import World
from lockstep.reporting.console import Logs

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch

    from lockstep.reporting.loggers import Tracking
    from lockstep.reporting.page import RunInfo
    from lockstep.tasks.panel import Content


# --- Provenance of a run: commit, versions, memory ---

PACKAGES = ("lockstep", "torch", "lightning", "torchvision", "timm", "hydra-core", "numpy")


def git_sha() -> str | None:
    """The commit of the project, else of Lockstep's checkout, with `-dirty` if files were changed since; None without git."""
    root = project.current().root or (None if WHEEL else ROOT)
    if root is None:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


@cache  # asked at every checkpoint; reading the packages' metadata takes 30 ms
def versions() -> str:
    found = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


def peak_bytes(device: "torch.device") -> int | None:
    """The most memory that this process has had so far: of its GPU if it has one, else of the host."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_memory_bytes(trainer: "pl.Trainer") -> int | None:
    """That of the process with the most. Call it on all ranks."""
    import torch

    device = trainer.strategy.root_device
    peak = peak_bytes(device)
    if peak is None:
        return None
    return int(trainer.strategy.reduce(torch.tensor(float(peak), device=device), reduce_op="max"))


# --- The status of a run that could not write its own end, and the names of its test figures. Free of torch ---

SEPARATOR = " | "  # of names in `evaluated`: values of report.json are neither lists nor dicts


def evaluated(report: dict[str, Any]) -> list[str]:
    """The names of the test figures, which a LightningModule may call as it likes."""
    return [name for name in str(report.get("evaluated", "")).split(SEPARATOR) if name in report]


def status(folder: Path, report: dict[str, Any]) -> str:
    """The status of a run; `died` if it did not write its end: `running`, on this machine, but no process holds its lock."""
    died = report["status"] == "running" and report.get("host") == socket.gethostname() and not files.is_taken(folder)
    return "died" if died else str(report["status"])


def mark_ended(folder: Path, error: BaseException) -> None:
    """Sets the final status if the processes could not. At Ctrl-C, one may fail because another is gone already."""
    if getattr(error, "exit_code", 1) == 2 or isinstance(error, UserError) or not (folder / "report.json").is_file():
        return
    report = read_report(folder)
    if report["status"] in ("running", "failed" if isinstance(error, KeyboardInterrupt) else "running"):
        ended = getattr(error, "status", "failed" if isinstance(error, Exception) else "interrupted")
        write_json(folder / "report.json", report | {"status": ended, "error": str(error) or type(error).__name__})


# --- A run's files: config.yaml, train.log, report.json and report.html, written by rank 0 ---


def offered_figures(trainer: "pl.Trainer") -> dict[str, Any]:
    """Figures that callbacks add to the report by a method `report_figures() -> dict`, called on every rank."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    offered: list[dict[str, Any]] = [getattr(callback, "report_figures", dict)() for callback in callbacks]
    return {name: value for figures in offered for name, value in figures.items()}


def offered_panels(trainer: "pl.Trainer | None") -> "list[Content]":
    """Panels that callbacks add to report.html by a method `report_panels() -> list`, called on rank 0."""
    callbacks = trainer.callbacks if trainer else ()  # type: ignore[attr-defined]
    return [panel for callback in callbacks for panel in getattr(callback, "report_panels", list)()]


class Recorder:
    """Keeps the status in the run's report up to date: running, then done, failed or interrupted.

    `begin` makes the directory, after everything is built. A user's class that fails earlier leaves a report and a log, but
    no config.yaml, so the same command can be typed again.

    Raises:
        UserError: the directory belongs to another run.
    """

    def __init__(self, cfg: DictConfig, world: World) -> None:
        self.cfg, self.rank, self.dir = cfg, world.rank, run_dir(cfg)
        self.began_s = time.perf_counter()
        self.logs = Logs()
        self.before: dict[Path, str] = {}  # the report of a resumed run, restored if the resume is refused
        self.made = False
        self.resumed_at = 0  # steps done
        self.module: pl.LightningModule | None = None
        self.panels: list[Content] = []  # of the test set
        self.trained_s: float | None = None  # perf_counter when training ended
        self.was_validated = True
        self.trainer: pl.Trainer | None = None
        self.tracking: Tracking | None = None
        self.report: dict[str, Any] = {
            "status": "running",
            "run": cfg.run,
            "task": title(cfg.task),
            "model": model_title(cfg),
            "strategy": cfg.strategy.name,
            "world_size": world.size,
            "accelerator": world.accelerator,
            "devices": world.devices,
            "nodes": world.nodes,
            "precision": str(cfg.trainer.precision),
            **batches(cfg, world),
            "seed": cfg.seed,
            "monitor": cfg.checkpoint.monitor,
            "monitor_mode": cfg.checkpoint.mode,
            "data/name": title(cfg.data),
            "resumed_from": cfg.resume,
            "restarts": 0,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "host": socket.gethostname(),
            "git_sha": git_sha(),
            "versions": versions(),
        }

    def __enter__(self) -> "Recorder":
        return self

    def begin(self, trainer: "pl.Trainer", data: "pl.LightningDataModule", module: "pl.LightningModule") -> None:
        from lockstep.data.datamodule import facts

        self.trainer, self.data, self.module = trainer, data, module
        self.report |= facts(data)
        if self.rank == 0:
            self.open()

    def open(self) -> None:
        config, report = self.dir / "config.yaml", self.dir / "report.json"
        self.make_folder()
        files.take(self.dir)
        self.before = {path: path.read_text() for path in (config, report) if path.is_file()}
        if self.cfg.resume:
            self.resumed_at = step_of(Path(self.cfg.resume))
            if report in self.before:
                earlier = read_report(self.dir)
                self.report["started"] = earlier.get("started", self.report["started"])
                self.report["restarts"] = int(earlier.get("restarts") or 0) + 1
        elif config.exists():
            raise UserError(f"run={self.cfg.run}: {self.dir} exists. Type resume=auto to continue it, or another name.")
        saved = {key: value for key, value in self.cfg.items() if key != "resume"}
        write_text(config, OmegaConf.to_yaml(OmegaConf.create(saved | {"resume": None}), resolve=True))
        self.logs.open(self.dir)
        write_json(report, self.report)
        if self.trainer is not None:
            from lockstep.reporting.loggers import Tracking

            plain: Any = OmegaConf.to_container(self.cfg, resolve=True)
            self.tracking = Tracking()
            self.tracking.begin(self.trainer.loggers, plain, self.report)

    def make_folder(self) -> None:
        self.made = not self.dir.exists()
        (self.dir / "checkpoints").mkdir(parents=True, exist_ok=True)

    def add(self, **figures: Any) -> None:
        """Adds figures of an evaluation to the report and the loggers. The last evaluation is the test."""
        assert self.trainer is not None
        self.report |= {**figures, "evaluated": SEPARATOR.join(figures)}
        if self.rank == 0 and self.dir.is_dir():
            write_json(self.dir / "report.json", self.report)  # before its row: loggers.py drops what the report has
        for logger in self.trainer.loggers if self.rank == 0 else ():
            logger.log_metrics(figures, self.report["train/steps"])

    def trained(self, checkpoint: str | None) -> None:
        """Adds the figures of training. Call it on every rank."""
        from lockstep.training.steps import steps_done

        trainer, monitor, unit = self.trainer, self.cfg.checkpoint.monitor, self.report["unit"]
        assert trainer is not None
        batches = trainer.num_training_batches  # of an epoch; infinite where the dataloader has no length
        begun = math.ceil((trainer.fit_loop.total_batch_idx + 1) / batches) if 0 < batches < math.inf else None
        self.report |= {
            "train/steps": steps_done(trainer),
            "train/epochs": trainer.current_epoch if begun is None else begun,
            # null without the callback that measures them
            **dict.fromkeys((f"train/{unit}_per_s", "train/data_wait_share", "train/first_step_s")),
            **offered_figures(trainer),
        }
        self.trained_s = time.perf_counter()
        known_s = sum(value for name, value in self.report.items() if name.startswith("time/"))
        self.report["time/start_s"] = max(0.0, self.trained_s - self.began_s - known_s)
        rate = self.report[f"train/{unit}_per_s"] if self.rank == 0 else None
        flops = getattr(self.module, "flops_per_sample", None)
        self.report |= {
            "train/flops_per_s": None if rate is None or flops is None else flops * rate,
            "peak_memory_bytes": peak_memory_bytes(trainer),
            "parameters": sum(p.numel() for p in trainer.lightning_module.parameters()),
            "checkpoint": os.path.relpath(checkpoint, self.dir) if checkpoint else None,
            **self.validated(),
        }
        self.was_validated = not monitor or trainer.strategy.broadcast(monitor in self.report)

    def validated(self) -> dict[str, float]:
        """The validation figures of the tested checkpoint: the best by `checkpoint.monitor`, the last without one."""
        monitor = self.cfg.checkpoint.monitor
        sign = 1 if self.cfg.checkpoint.mode == "max" else -1
        rows = read_metrics(self.dir / "metrics.csv") if self.rank == 0 else []
        validated = [r for r in rows if (monitor in r if monitor else any(name.startswith("val/") for name in r))]
        by = (lambda r: (sign * r[monitor], -r.get("val/loss", 0), r["step"])) if monitor else (lambda r: r["step"])
        best = max(validated, key=by, default={})
        return {name: value for name, value in best.items() if name not in ("step", "epoch", "val/count")}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.end(error)
        finally:
            files.release(self.dir)

    def end(self, error: BaseException | None) -> None:
        ended = "failed" if isinstance(error, Exception) else "interrupted"
        self.report["status"] = "done" if error is None else getattr(error, "status", ended)
        self.report["wall_s"] = time.perf_counter() - self.began_s
        if self.trained_s is not None:
            self.report["time/test_s"] = time.perf_counter() - self.trained_s
        if error is not None:
            self.report["error"] = f"{type(error).__name__}: {error}"
        if isinstance(error, Exception) and not isinstance(error, UserError | TrainingFailed):
            process.report_failure(self.rank)  # now, because the others wait for this process
        if self.rank != 0 or (not self.logs.handlers and (error is None or isinstance(error, UserError))):
            return
        if self.logs.handlers and not self.dir.is_dir():  # it was removed meanwhile
            self.logs.close()
            return
        if not self.logs.handlers:  # a user's class failed before the run began
            self.make_folder()
            self.logs.open(self.dir)
        if error is not None:
            # Expected errors need no traceback; train.log gets the traceback of all others.
            trace = None if isinstance(error, UserError | TrainingFailed) else error
            logging.getLogger("lockstep").info("%s", self.report["error"], exc_info=trace)
        refused = isinstance(error, UserError) and not self.is_saved()
        if not refused:
            write_json(self.dir / "report.json", self.report)  # first, because a logger's server may take its time
        panels = [*self.panels, *offered_panels(self.trainer)]
        if not refused:
            from lockstep.reporting.page import write_page

            with suppress(*([Exception] if error else [])):  # the error that ended the run is what counts
                write_page(self.info(), self.report, self.module, panels)
        if self.tracking:
            self.tracking.end(self.report, panels, self.dir)
        self.logs.close()
        if refused:  # a mistake found late: restore everything
            return self.undo()
        if error is None:
            if not (self.dir / "config.yaml").is_file():
                gone = f"{self.dir}/config.yaml was removed while the run was going on: eval.py needs it."
                print(f"WARNING: {gone}", file=sys.stderr)
            from lockstep.reporting.page import show_run

            show_run(self.info(), self.report, self.module)

    def info(self) -> "RunInfo":
        from lockstep.reporting.page import RunInfo

        plain = OmegaConf.create(OmegaConf.to_container(self.cfg, resolve=True))
        assert isinstance(plain, DictConfig)
        config, overrides = OmegaConf.to_yaml(plain), as_overrides(plain)
        return RunInfo(str(plain.run), str(plain.runs_dir), overrides, config, bool(plain.compile))

    def is_saved(self) -> bool:
        """Whether this start has trained steps, and a checkpoint is there."""
        from lockstep.training.steps import steps_done

        if self.trainer is None or self.trainer.lightning_module is None:
            return False
        return steps_done(self.trainer) > self.resumed_at and bool(found_in(self.dir))

    def undo(self) -> None:
        """Removes the files of a run that could not start, and restores what was there before. One that `is_saved` keeps them."""
        if self.made:
            shutil.rmtree(self.dir)
            return
        for name in ("config.yaml", "report.json"):
            path = self.dir / name
            if path in self.before:
                write_text(path, self.before[path])
            else:
                path.unlink(missing_ok=True)
