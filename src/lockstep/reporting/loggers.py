"""Loggers: metrics.csv, which is always written, W&B and TensorBoard."""

import csv
import logging
import netrc
import os
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from lockstep.compat.wandb_anonymous import without_anonymous
from lockstep.errors import TrainingFailed, UserError
from lockstep.machine import files
from lockstep.reporting.background import LATE_S, Background
from lockstep.training.steps import steps_done

log = logging.getLogger("lockstep")
WANDB_SERVER = "https://api.wandb.ai"


class MetricsCsv(Logger):
    """runs/<name>/metrics.csv: a row per logged step, a column per metric."""

    def __init__(self, *, run_dir: Path, run: str) -> None:
        super().__init__()
        self.path = run_dir / "metrics.csv"
        self.columns: list[str] = []

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the config is in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row: dict[str, Any] = {"step": step, **{name: float(value) for name, value in metrics.items()}}
        if not self.path.exists():
            self.begin_anew()
        elif not self.columns:
            self.columns = self.rows()[0]
        new = [name for name in row if name not in self.columns]
        if new:
            self.widen(new)
        with files.naming(self.path), self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row)

    def begin_anew(self) -> None:
        if not self.path.parent.is_dir():
            raise TrainingFailed(f"{self.path.parent} was removed while the run was going on. Start it again.")
        if self.columns:
            log.warning("%s was removed while the run was going on: its earlier rows are lost", self.path)
        self.columns = []

    def rows(self) -> tuple[list[str], list[dict[str, str]]]:
        """Columns and rows, without a last row that a kill cut off."""
        lines = self.path.read_text().splitlines(keepends=True)
        reader = csv.DictReader([line for line in lines if line.endswith("\n")])
        return list(reader.fieldnames or []), list(reader)

    def widen(self, new: list[str]) -> None:
        """Adds columns: rewrites the file and replaces it."""
        old = self.rows()[1] if self.path.exists() else []
        self.columns = [*self.columns, *new]
        self.write(old)

    def write(self, rows: list[dict[str, str]]) -> None:
        with files.replacing(self.path) as part, part.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)

    @rank_zero_only
    def cut(self, steps: int) -> None:
        """Drops the rows after `steps` steps, which a resumed run will write again."""
        if self.path.exists():
            self.columns, rows = self.rows()
            self.write([row for row in rows if int(row["step"]) < steps])


class CutAtResume(pl.Callback):
    """Cuts logs at the checkpoint's step, so no row is written twice. W&B keeps what it has been sent."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        steps = steps_done(trainer)
        for logger in trainer.loggers if steps else ():
            if isinstance(logger, MetricsCsv):
                logger.cut(steps)
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                writer = logger.experiment
                writer.close()  # it opens a new file that first purges older records from this step on
                writer.purge_step = steps


def server() -> str:
    return os.environ.get("WANDB_BASE_URL") or WANDB_SERVER


def has_wandb_key() -> bool:
    """Whether W&B's client would find an API key for its server."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(urlsplit(server()).hostname or "")
    except (OSError, netrc.NetrcParseError):
        return False
    return bool(found and found[2])


def unreachable(server: str, timeout_s: float = 5.0) -> str:
    """Why W&B's server cannot be reached; empty if it can, or if a proxy decides that."""
    url = urlsplit(server)
    if any(name.lower().endswith("proxy") for name in os.environ):
        return ""
    try:
        socket.create_connection(
            (url.hostname or "", url.port or (80 if url.scheme == "http" else 443)), timeout_s
        ).close()
    except OSError as e:
        return f"{url.netloc} cannot be reached ({e})"
    return ""


class Wandb(WandbLogger):
    """Refuses the run when W&B cannot start, which it does when the run begins."""

    @property
    def experiment(self) -> Any:
        from wandb import errors

        try:
            return super().experiment
        except (errors.Error, ValueError) as e:
            own = ", ".join(name for name in os.environ if name.startswith("WANDB_")) or "none"
            raise UserError(
                f"logger.wandb: W&B cannot start: {' '.join(str(e).split())}. Type logger.wandb.mode=offline, or correct the key or the "
                f"variables of the environment (set: {own})."
            ) from e


def wandb(
    *,
    run_dir: Path,
    run: str,
    project: str,
    entity: str | None,
    group: str | None,
    tags: list[str],
    id: str | None,
    mode: str,
) -> WandbLogger:
    """W&B. `mode=auto` is online with an API key and offline without; WANDB_MODE overrides it."""
    import wandb as client

    if mode == "auto":
        mode = os.environ.get("WANDB_MODE", "")
        if not mode:
            mode = "online" if has_wandb_key() else "offline"
            if mode == "online" and getattr(rank_zero_only, "rank", 0) == 0 and (why := unreachable(server())):
                log.warning("W&B logs offline: %s", why)
                mode = "offline"
    settings = client.Settings(console="off", silent=True)
    if mode == "online" and hasattr(settings, "finish_timeout"):  # not in wandb 0.24
        settings.finish_timeout = float(
            os.environ.get("WANDB_FINISH_TIMEOUT", LATE_S)
        )  # else it waits for ever for a lost server
    logger = Wandb(
        name=run,
        save_dir=str(run_dir),
        id=id,
        resume="allow",
        project=project,
        entity=entity,
        group=group,
        tags=list(tags),
        mode=mode,
        settings=settings,
    )
    without_anonymous(logger)
    return logger


def wandb_sync_line(run_dir: Path) -> str | None:
    """The command that uploads offline runs to W&B; None if there are none."""
    offline = sorted((run_dir / "wandb").glob("offline-run-*"))
    return f"wandb sync {shlex.join(map(str, offline))}" if offline else None  # one part per resume


def in_background(logger: Logger, name: str) -> Logger:
    logger.background = Background(logger, name)  # type: ignore[attr-defined]
    return logger


def tensorboard(*, run_dir: Path) -> TensorBoardLogger:
    return TensorBoardLogger(save_dir=str(run_dir), name="tensorboard", version="", default_hp_metric=False)


def finish(loggers: list[Logger], status: str) -> None:
    """Flushes loggers and ends W&B's run; otherwise the next job of a multirun would continue in it."""
    for logger in loggers:
        logger.finalize("success" if status == "done" else "failed")  # again, for the test figures
        if background := getattr(logger, "background", None):
            background.finish(done=status == "done")
        if isinstance(logger, WandbLogger):
            logger.experiment.finish(exit_code=0 if status == "done" else 1)
