"""MLflow, read back by its own client. Without its package, its tests are skipped."""

import importlib.util
import logging
import os
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lockstep.config.checks import check
from lockstep.config.compose import compose_config
from lockstep.errors import Preempted, UserError
from lockstep.extras import mlflow_logger

SEEN = "train/images_seen"


needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs the extra `mlflow`")


@pytest.fixture
def stop(monkeypatch):
    """Ends a run at the end of its fifth step, the first time."""
    from lockstep.callbacks import FiniteLoss

    def set_up(raised: BaseException) -> None:
        left = [raised]

        def hook(self, trainer, *_):
            if trainer.global_step == 5 and left:
                raise left.pop()

        monkeypatch.setattr(FiniteLoss, "on_train_batch_end", hook)

    return set_up


def test_a_package_that_is_missing_is_said_without_torch(monkeypatch):
    cfg = compose_config("train", ["logger=[csv,mlflow]", "trainer.accelerator=cpu"])
    monkeypatch.setitem(sys.modules, "mlflow", None)
    (problem,) = check(cfg)
    assert problem.startswith("logger=mlflow needs the package mlflow-skinny") and "uv sync --extra mlflow" in problem


def test_an_upload_without_checkpoints_is_refused():
    given = ["logger=[csv,wandb]", "logger.wandb.log_model=true", "trainer.enable_checkpointing=false"]
    (problem,) = check(compose_config("train", [*given, "trainer.accelerator=cpu"]))
    assert problem.startswith("logger.wandb.log_model has no effect with trainer.enable_checkpointing=false")


# --- MLflow ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_server(monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in [name for name in os.environ if name == "MLFLOW_TRACKING_URI" or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def client(path: str = "runs/mlflow.db"):
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{Path(path).resolve()}")


@pytest.mark.slow
@needs_mlflow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_everything_when_it_is_read_back_and_a_resumed_run_is_the_same(train, no_server, stop):
    common = ["run=sweep/3", "logger=mlflow", "trainer.log_every_n_steps=4", "checkpoint.every_n_steps=4"]
    stop(Preempted("a warning"))
    with pytest.raises(Preempted):
        train(*common, "logger.mlflow.log_model=true")
    (run,) = client().search_runs(["1"])
    assert (run.info.status, run.data.tags["status"]) == ("KILLED", "preempted")
    assert not client().list_artifacts(run.info.run_id, "checkpoints")
    found = train(*common, "resume=auto", "logger.mlflow.log_model=true", "trainer.max_epochs=2")
    (again,) = client().search_runs(["1"])
    assert again.info.run_id == run.info.run_id
    assert (again.info.status, again.info.run_name, again.data.tags["status"]) == ("FINISHED", "sweep/3", "done")
    assert (again.data.tags["group"], again.data.tags["tags"]) == ("sweep", "basic_net, mnist, single")
    assert again.data.params["optim.lr"] == "0.001"
    assert again.data.tags["resumed.trainer.max_epochs"] == "2"
    history = client().get_metric_history(run.info.run_id, SEEN)
    assert (history[-1].step, history[-1].value) == (24, 24 * 48)
    assert again.data.metrics["test/acc"] == pytest.approx(found["test/acc"])
    page = client().download_artifacts(run.info.run_id, "report.html")
    assert Path(page).read_bytes() == Path("runs/sweep/3/report.html").read_bytes()
    (checkpoint,) = client().list_artifacts(run.info.run_id, "checkpoints")
    kept = client().download_artifacts(run.info.run_id, checkpoint.path)
    assert Path(kept).read_bytes() == Path("runs/sweep/3", found["checkpoint"]).read_bytes()


@needs_mlflow
def test_mlflow_logs_beside_the_runs_when_its_server_is_away(tmp_path, no_server, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    place = {"runs_dir": tmp_path, "run": "a", "experiment_name": "e", "group": None, "tags": []}
    with caplog.at_level(logging.WARNING):
        made = mlflow_logger.mlflow(**place, tracking_uri=None, id="abc")
    assert made.options["tracking_uri"] == f"sqlite:///{tmp_path}/mlflow.db"
    assert "127.0.0.1:9 cannot be reached" in caplog.text
    assert not list(tmp_path.iterdir())  # it connects when the run begins


@pytest.mark.slow  # the import of MLflow
@needs_mlflow
@pytest.mark.filterwarnings("ignore")
def test_an_address_that_is_no_server_of_mlflow_is_refused(train, no_server, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    with pytest.raises(UserError, match=r"logger.mlflow cannot start: .*tracking_uri=null"):
        train("run=a", "logger=mlflow", f"logger.mlflow.tracking_uri=http://127.0.0.1:{server.server_address[1]}")
    server.shutdown()
    server.server_close()
    assert not Path("runs/a").exists()
