"""metrics.csv and the other loggers, which get the config at the start of a run and `RunEnd` at its end.

Any Lightning logger works. If it has a method `on_run_end(end: RunEnd)`, that is called at the end of the run, on rank
0 and in the logger's own thread.
"""

import logging
import math
import os
import queue
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only

from lockstep.config.compose import dotted
from lockstep.config.project import is_user_code_error
from lockstep.config.run_config import RunConfig
from lockstep.errors import UserError
from lockstep.machine.world import unreachable
from lockstep.run import RunFolder

log = logging.getLogger("lockstep")

# --- A thread per logger: a logger's server must neither stop nor slow a run ---

METHODS = ("log_metrics", "log_hyperparams", "save", "after_save_checkpoint", "on_run_end", "finalize")
LATE_S = 60.0  # how long a call may take before a warning, and how long a run waits for it at its end
SHORT_S = 5.0  # how long a failed run waits: other processes may be waiting for it


class Background:
    """Runs the methods of a logger in order, in a thread of rank 0. If they fail, metrics.csv still has all metrics."""

    def __init__(self, logger: Logger, name: str, config: RunConfig, report: Mapping[str, Any]) -> None:
        """Collects calls, the first with the config, until `start`."""
        self.logger, self.name, self.warned = logger, name, set[bool]()
        self.calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.began_s = math.inf  # start of the running call; infinite without one
        self.thread = threading.Thread(target=self.work, name=f"logger.{name}", daemon=True)
        for method in filter(partial(hasattr, logger), METHODS):
            setattr(logger, method, partial(self.add, getattr(logger, method)))
        logger.log_hyperparams({**config.values, "facts": {fact: report.get(fact) for fact in FACTS}})  # type: ignore[call-arg]
        write, batch_size, samples_key = logger.log_metrics, report["batch_size"], f"train/{report['unit']}_seen"

        def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
            """Adds the number of samples that the optimizer has seen, as a second x-axis."""
            seen = {samples_key: step * batch_size} if step is not None and batch_size else {}
            write({**seen, **metrics}, step)

        logger.log_metrics = log_metrics  # type: ignore[method-assign]

    def start(self) -> None:
        """Creates the logger's run. Call it on rank 0. Raises UserError if its client cannot start."""
        if self.thread.ident:
            return
        try:
            _ = getattr(self.logger, "experiment", None)
        except Exception as e:
            if is_user_code_error(e):
                raise
            # pydantic's errors, from W&B's settings, would show the value, perhaps a key
            reason = e.errors()[0]["msg"] if hasattr(e, "errors") else " ".join(str(e).split())
            raise UserError(f"logger.{self.name} cannot start: {reason}") from e
        self.thread.start()

    def add(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if time.monotonic() - self.began_s > LATE_S:
            self.warn("does not respond")
        self.calls.put(partial(call, *args, **kwargs))

    def work(self) -> None:
        while (call := self.calls.get()) is not None:
            self.began_s = time.monotonic()
            try:
                call()
            except Exception as e:
                self.warn(f"failed with {type(e).__name__}: {e}", e if is_user_code_error(e) else None)
            self.began_s = math.inf

    def warn(self, what: str, bug: Exception | None = None) -> None:
        if (is_bug := bug is not None) not in self.warned:  # each kind once
            self.warned.add(is_bug)
            text = "logger.%s %s. Training continues without it; metrics.csv has all metrics."
            log.warning(text, self.name, what, exc_info=bug)

    def finish(self, wait_s: float) -> None:
        """Waits for the queued calls, until the running call has taken `wait_s` seconds, and ends the thread."""
        self.calls.put(None)
        end_s = min(time.monotonic(), self.began_s) + wait_s
        self.thread.join(max(0.0, end_s - time.monotonic()))
        if self.thread.is_alive():
            self.warn("does not respond")


# --- Start and end of all loggers ---


FACTS = ("task", "model", "world_size", "accelerator", "nodes", "host", "data/name", "data/sha256", "git_sha", "versions")  # fmt: skip
UPLOAD_S = 600.0  # how long a run waits for the upload of its checkpoint


@dataclass(frozen=True)
class RunEnd:
    status: str  # done, failed, preempted, interrupted or pruned
    error: str | None
    step: int
    page: Path | None = None  # report.html, if it exists; this and the fields below are set only if status is done
    panels: Sequence[Any] = ()  # the page's panels about the test set
    checkpoint: Path | None = None  # the tested checkpoint: a file, or the folder of a sharded one


def end_run(
    backgrounds: Sequence[Background], folder: RunFolder, report: Mapping[str, Any], panels: Sequence[Any]
) -> None:
    """Reports the end of the run to all loggers and waits for them."""
    status, page, checkpoint = report["status"], folder.page_file, report.get("checkpoint")
    end = RunEnd(status, report.get("error"), int(report.get("train/steps", 0)))
    if is_done := status == "done":
        path = folder.path / checkpoint if checkpoint else None
        end = replace(end, page=page if page.is_file() else None, panels=panels, checkpoint=path)
    for background in (each for each in backgrounds if each.thread.ident):
        logger = background.logger
        if hasattr(logger, "on_run_end"):
            logger.on_run_end(end)
        logger.finalize("success" if is_done else "failed")  # a second time, for the test metrics
        uploads = end.checkpoint and getattr(logger, "log_model", False)
        background.finish(UPLOAD_S if uploads else LATE_S if is_done else SHORT_S)
        if isinstance(logger, WandbLogger):
            # in this thread: otherwise the next job of a multirun would continue this W&B run
            logger.experiment.finish(exit_code=EXIT_CODES.get(status, 1))


def flat(params: dict[Any, Any]) -> dict[str, Any]:
    """Flattens to keys as on the command line (`optim.lr`). Values other than numbers and bools become strings."""
    values = dotted(params).items()
    return {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in values}


# --- metrics.csv, which is always written ---


class MetricsCsv(Logger):
    """runs/<name>/metrics.csv: a row per logged step, a column per metric."""

    name, version = "csv", ""  # type: ignore[assignment]

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.log = RunFolder(run_dir).metrics_log

    @property
    def save_dir(self) -> str:
        """Where a module may write its own files."""
        return str(self.log.path.parent)

    log_dir = save_dir

    @property
    def experiment(self) -> Any:
        """Logs metrics, like Lightning's CSVLogger; ignores images and the like, which modules may send to it."""
        dummy: Any = DummyLogger().experiment
        dummy.log_metrics = self.log_metrics
        return dummy

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the config is in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.log.append({"step": step, **{name: float(value) for name, value in metrics.items()}})


# --- TensorBoard: it cannot show report.html, so it gets its path ---


class TensorBoard(TensorBoardLogger):
    """Shows the config as text, and the run as a row in the HParams tab, next to all metrics."""

    @rank_zero_only
    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        from torch.utils.tensorboard.summary import hparams

        super().log_hyperparams(params)  # adds them to `hparams`, which is written to hparams.yaml
        values = flat(dict(self.hparams))  # hyperparameters of a module come later, when the row has begun
        rows = [f"| {key} | {value} |" for key, value in values.items()]
        self.experiment.add_text("config", "\n".join(["| key | value |", "| --- | --- |", *rows]), 0)
        # Part 1 is the row of the run. Part 0 would restrict the metrics that are shown.
        self.experiment.file_writer.add_summary(hparams(values, {})[1])

    @rank_zero_only
    def on_run_end(self, end: RunEnd) -> None:
        if end.page:
            self.experiment.add_text("report", f"Full report: {end.page}", end.step)
        self.experiment.add_text("status", f"{end.status}: {end.error}" if end.error else end.status, end.step)


def tensorboard(*, run_dir: Path, purge_step: int | None = None) -> TensorBoardLogger:
    """`purge_step`: hides the records of earlier starts of the run from this step on."""
    given: dict[str, Any] = {"default_hp_metric": False, "purge_step": purge_step}
    return TensorBoard(save_dir=str(run_dir), name="tensorboard", version="", **given)


# --- W&B: online with an API key, otherwise offline ---

# W&B shows 255 as killed, and other codes as failed, or as preempted if the run was marked.
EXIT_CODES = {"done": 0, "pruned": 0, "interrupted": 255}


def wandb_mode() -> str:
    """Online if the server can be reached and W&B's client has an API key (environment or netrc file)."""
    from requests.utils import get_netrc_auth

    server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    if not (os.environ.get("WANDB_API_KEY") or (get_netrc_auth(server) or ("", ""))[1]):
        return "offline"
    if getattr(rank_zero_only, "rank", 0) == 0 and (reason := unreachable(server)):
        log.warning("W&B logs offline: %s", reason)
        return "offline"
    return "online"


class Wandb(WandbLogger):
    log_model = False

    @rank_zero_only
    def on_run_end(self, end: RunEnd) -> None:
        """Names the checkpoint like Lightning's logger: `model-<id>`, of type `model`."""
        from wandb import Artifact, Html

        run = self.experiment
        run.summary.update({"status": end.status, **({"error": end.error} if end.error else {})})
        if end.status == "preempted":
            run.mark_preempting()
        if end.page:
            run.log({"report": Html(end.page, inject=False), "trainer/global_step": end.step})
        if end.checkpoint and self.log_model:
            artifact = Artifact(f"model-{self.version}", "model", metadata={"original_filename": end.checkpoint.name})
            add = artifact.add_dir if end.checkpoint.is_dir() else partial(artifact.add_file, name="model.ckpt")
            add(str(end.checkpoint))
            run.log_artifact(artifact, aliases=["latest", "best"])


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
    log_model: bool = False,
) -> WandbLogger:
    """W&B's logger. `mode=auto` is online with an API key and offline without; WANDB_MODE overrides `auto`."""
    import wandb as client

    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or wandb_mode()
    settings = client.Settings(console="off", silent=True)
    if mode == "online":
        # otherwise it waits forever for a lost server
        settings.finish_timeout = float(os.environ.get("WANDB_FINISH_TIMEOUT", UPLOAD_S if log_model else LATE_S))
    identity: dict[str, Any] = {"project": project, "entity": entity, "group": group, "name": run, "id": id}
    logger = Wandb(**identity, tags=list(tags), save_dir=str(run_dir), resume="allow", mode=mode, settings=settings)
    logger.log_model = log_model
    return logger


def wandb_sync_line(run_dir: Path) -> str | None:
    """The command that uploads offline runs to W&B; None if there are none."""
    offline = sorted((run_dir / "wandb").glob("offline-run-*"))
    return f"wandb sync {shlex.join(map(str, offline))}" if offline else None  # one folder per resume
