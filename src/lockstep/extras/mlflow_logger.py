"""MLflow: a tracking server, or a database beside the runs."""

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
from lockstep.reporting.loggers import RunEnd, flat, unreachable

log = logging.getLogger("lockstep")
STATUS = {"done": "FINISHED", "pruned": "FINISHED", "failed": "FAILED"}  # others were ended from outside: KILLED
ID = "lockstep.id"  # the tag by which a resumed run is found
PARAMS, LONGEST = 100, 500  # parameters in a request; characters of one, which every version of a server takes


class MLflow(MLFlowLogger):
    """MLflow at `tracking_uri`, else at MLFLOW_TRACKING_URI, else, or if that server is away, in <runs_dir>/mlflow.db.

    Lightning's logger, but it connects when the run begins, and not in its constructor.

    Raises:
        UserError: the package is not installed.
    """

    local = "tracking_uri=null"  # works without the server

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
            raise UserError(
                "logger=mlflow needs mlflow-skinny. Run uv sync --extra mlflow, or pip install mlflow-skinny."
            )
        Logger.__init__(self)
        self.id, self.log_model, self.connected = id, log_model, False
        # the client's own defaults, 7 retries of 120 s, would hold a run up for minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        uri, place = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"), None
        if uri and uri.startswith("http") and getattr(rank_zero_only, "rank", 0) == 0 and (why := unreachable(uri)):
            log.warning("MLflow logs to %s: %s", runs_dir / "mlflow.db", why)
            uri = None
        if not uri:
            here = runs_dir.resolve()
            uri, place = f"sqlite:///{here / 'mlflow.db'}", (here / "mlflow-artifacts").as_uri()
        known = {ID: id, "group": group, "tags": ", ".join(tags)}
        self.options: dict[str, Any] = {
            "experiment_name": experiment_name,
            "run_name": run,
            "tracking_uri": uri,
            "tags": {name: value for name, value in known.items() if value},
            "artifact_location": place,
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
        """MLflow's id of this run, if it has begun before. Creates the experiment."""
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        client, name = MlflowClient(self.options["tracking_uri"]), self.options["experiment_name"]
        if client.get_experiment_by_name(name) is None:
            with suppress(MlflowException):  # another run was first
                client.create_experiment(name, self.options["artifact_location"])
        experiment = client.get_experiment_by_name(name)
        runs = client.search_runs([experiment.experiment_id], f"tags.`{ID}` = '{self.id}'") if experiment else []
        for run in runs[:1]:
            client.update_run(run.info.run_id, "RUNNING")
            return str(run.info.run_id)
        return None

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """MLflow's parameters cannot change. Those that a resume has changed become tags, `resumed.<key>`."""
        from mlflow.entities import Param, RunTag

        client, run = self.experiment, self.run_id
        before = client.get_run(run).data.params
        values = {re.sub(r"[^\w./ -]", "_", key): str(value)[:LONGEST] for key, value in flat(params).items()}
        new = [Param(key, value) for key, value in values.items() if key not in before]
        for first in range(0, len(new), PARAMS):
            client.log_batch(run, params=new[first : first + PARAMS])
        changed = [RunTag(f"resumed.{key}", value) for key, value in values.items() if before.get(key, value) != value]
        client.log_batch(run, tags=changed)

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
        """Nothing: Lightning calls it when training ends, before the test; `on_run_end` knows more."""
