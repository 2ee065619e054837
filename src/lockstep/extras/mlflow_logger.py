"""Logs to MLflow: a tracking server, or a database in the runs folder."""

import logging
import os
import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger, MLFlowLogger
from lightning.pytorch.utilities import rank_zero_only

from lockstep.errors import UserError
from lockstep.machine.world import unreachable
from lockstep.reporting.loggers import RunEnd, flat

log = logging.getLogger("lockstep")
# other runs were ended from outside: KILLED
STATUS = {"done": "FINISHED", "pruned": "FINISHED", "failed": "FAILED", "diverged": "FAILED"}
ID = "lockstep.id"  # the tag that identifies a run when it is resumed
LONGEST = 250  # characters of a value that Lightning's logger keeps


class MLflow(MLFlowLogger):
    """Logs to `tracking_uri`, else to MLFLOW_TRACKING_URI; without both, or if the server is unreachable, to <runs_dir>/mlflow.db.

    Unlike Lightning's logger, it connects when the run begins, not in its constructor.

    Raises:
        UserError: the package is not installed.
    """

    def __init__(
        self,
        *,
        runs_dir: Path,
        run: str,
        experiment_name: str,
        tracking_uri: str | None,
        group: str | None,
        tags: list[str],
        id: str | None,
        log_model: bool = False,
    ) -> None:
        if find_spec("mlflow") is None:
            raise UserError("logger=mlflow needs mlflow-skinny. Run uv sync --extra mlflow, or pip install it.")
        Logger.__init__(self)
        self.id, self.log_model, self.connected = id, log_model, False
        # the client's defaults, 7 retries of 120 s, would block a run for minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        uri, artifact_location = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"), None
        if uri and uri.startswith("http") and getattr(rank_zero_only, "rank", 0) == 0 and (reason := unreachable(uri)):
            log.warning("MLflow logs to %s: %s", runs_dir / "mlflow.db", reason)
            uri = None
        if not uri:
            folder = runs_dir.resolve()
            uri, artifact_location = f"sqlite:///{folder / 'mlflow.db'}", (folder / "mlflow-artifacts").as_uri()
        all_tags = {ID: id, "group": group, "tags": ", ".join(tags)}
        self.options: dict[str, Any] = {
            "experiment_name": experiment_name,
            "run_name": run,
            "tracking_uri": uri,
            "tags": {name: value for name, value in all_tags.items() if value},
            "artifact_location": artifact_location,
        }

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if not self.connected:
            logging.getLogger("mlflow").setLevel(logging.WARNING)
            super().__init__(**self.options, run_id=self.resumed_run())
            self.connected = True
        return super().experiment

    def resumed_run(self) -> str | None:
        """MLflow's id of this run, if it was started before. Creates the experiment if needed."""
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        client, name = MlflowClient(self.options["tracking_uri"]), self.options["experiment_name"]
        with suppress(MlflowException):  # it exists
            client.create_experiment(name, self.options["artifact_location"])
        experiment = client.get_experiment_by_name(name)
        runs = client.search_runs([experiment.experiment_id], f"tags.`{ID}` = '{self.id}'") if experiment else []
        for run in runs[:1]:
            client.update_run(run.info.run_id, "RUNNING")
            return str(run.info.run_id)
        return None

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Logs new parameters. MLflow's parameters cannot change; values that a resume changed become tags, `resumed.<key>`."""
        client, run = self.experiment, self.run_id
        logged = client.get_run(run).data.params
        values = {re.sub(r"[^\w./ -]", "_", key): str(value)[:LONGEST] for key, value in flat(params).items()}
        super().log_hyperparams({key: value for key, value in values.items() if key not in logged})
        for key, value in values.items():
            if logged.get(key, value) != value:
                client.set_tag(run, f"resumed.{key}", value)

    @rank_zero_only
    def on_run_end(self, end: RunEnd) -> None:
        client, run = self.experiment, self.run_id
        client.set_tag(run, "status", end.status)
        if end.error:
            client.set_tag(run, "error", end.error)
        if end.page:
            client.log_artifact(run, str(end.page))
        if end.checkpoint and self.log_model:
            client.log_artifact(run, str(end.checkpoint), "checkpoints")
        client.set_terminated(run, STATUS.get(end.status, "KILLED"))

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Does nothing: Lightning calls it when training ends, before the test. `on_run_end` ends the run."""
