"""Trackio: a database on this machine, a server of one's own, or a Hugging Face Space."""

from collections.abc import Mapping, Sequence
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from lockstep.errors import UserError
from lockstep.reporting.panel_images import sheet


class Trackio(Logger):
    """Begins its run when the training begins. Trackio's client sends in a thread of its own, and keeps what it cannot send."""

    def __init__(self, *, log_model: bool, **options: Any) -> None:
        super().__init__()
        self.log_model, self.options, self.begun = log_model, options, None

    @property
    def name(self) -> str:
        return str(self.options["project"])

    @property
    def version(self) -> str:
        return str(self.options["name"])

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self.begun is None:
            import trackio

            # In a context of its own, or Trackio would finish the run once more when the process ends.
            try:
                self.begun = copy_context().run(partial(trackio.init, **self.options, embed=False))
            except (ValueError, OSError) as e:
                raise UserError(f"logger.trackio: Trackio cannot start: {' '.join(str(e).split())}") from e
        return self.begun

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        self.experiment.config.update(params)  # sent with the first figures

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.experiment.log({name: float(value) for name, value in metrics.items()}, step)

    @rank_zero_only
    def log_pictures(self, name: str, pictures: Sequence[tuple[Any, str]], step: int) -> None:
        from trackio import Image

        self.experiment.log({name: Image(sheet(pictures), name)}, step)

    @rank_zero_only
    def log_checkpoint(self, path: Path, name: str) -> None:
        if self.log_model:
            self.experiment.log_artifact(path, name=f"model-{name.replace('/', '-')}", type="model")

    @rank_zero_only
    def end(self, status: str, error: str | None, step: int) -> None:
        """Trackio has no status, so that of a run that is not done is an alert."""
        from trackio import AlertLevel

        if status not in ("done", "pruned"):
            self.experiment.alert(status, error, AlertLevel.ERROR if status == "failed" else AlertLevel.WARN, step)
        self.experiment.finish()


def trackio(
    *,
    run: str,
    resumed: bool,
    project: str,
    space_id: str | None,
    server_url: str | None,
    group: str | None,
    tags: list[str],
    log_model: bool = False,
) -> Logger:
    """Trackio at `space_id` or `server_url`, else at TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, else on this machine."""
    return Trackio(
        project=project,
        name=run,
        group=group,
        space_id=space_id,
        server_url=server_url,
        config={"tags": tags},
        resume="allow" if resumed else "never",  # a new run may have the name of an earlier one
        log_model=log_model,
    )
