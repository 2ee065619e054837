"""W&B: online with an API key, otherwise offline."""

import logging
import netrc
import os
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from lockstep.compat.lightning import without_anonymous
from lockstep.errors import UserError
from lockstep.reporting.background import LATE_S
from lockstep.reporting.tracking import UPLOAD_S

log = logging.getLogger("lockstep")
WANDB_SERVER = "https://api.wandb.ai"
# 255 is killed, another one failed, or preempted if it was marked.
EXIT_CODES = {"done": 0, "pruned": 0, "interrupted": 255}


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
        port = url.port or (80 if url.scheme == "http" else 443)
        socket.create_connection((url.hostname or "", port), timeout_s).close()
    except OSError as e:
        return f"{url.netloc} cannot be reached ({e})"
    return ""


class Wandb(WandbLogger):
    """Refuses the run when W&B cannot start, which it does when the run begins."""

    def __init__(self, *, log_model: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.log_model = log_model

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

    @rank_zero_only
    def log_pictures(self, name: str, pictures: Sequence[tuple[Any, str]], step: int) -> None:
        from wandb import Image

        images = [Image(image, caption=caption) for image, caption in pictures]
        self.experiment.log({name: images, "trainer/global_step": step})

    @rank_zero_only
    def log_checkpoint(self, path: Path, name: str) -> None:
        """As Lightning's logger names it: `model-<id>`, of the type `model`."""
        from wandb import Artifact

        if not self.log_model:
            return
        artifact = Artifact(f"model-{self.version}", "model", metadata={"original_filename": path.name, "run": name})
        artifact.add_dir(str(path)) if path.is_dir() else artifact.add_file(str(path), "model.ckpt")
        self.experiment.log_artifact(artifact, aliases=["latest", "best"])

    @rank_zero_only
    def end(self, status: str, error: str | None, step: int) -> None:
        self.experiment.summary.update({"status": status, **({"error": error} if error else {})})
        if status == "preempted":
            self.experiment.mark_preempting()


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
    if mode == "online":
        # else it waits for ever for a lost server
        settings.finish_timeout = float(os.environ.get("WANDB_FINISH_TIMEOUT", UPLOAD_S if log_model else LATE_S))
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
        log_model=log_model,
    )
    without_anonymous(logger)
    return logger


def finish(logger: Logger, status: str) -> None:
    """Ends W&B's run, in this thread; otherwise the next job of a multirun would continue in it."""
    if isinstance(logger, WandbLogger):
        logger.experiment.finish(exit_code=EXIT_CODES.get(status, 1))


def wandb_sync_line(run_dir: Path) -> str | None:
    """The command that uploads offline runs to W&B; None if there are none."""
    offline = sorted((run_dir / "wandb").glob("offline-run-*"))
    return f"wandb sync {shlex.join(map(str, offline))}" if offline else None  # one part per resume
