"""MLflow and Trackio, read back by their own clients. Without their packages, their tests are skipped."""

import importlib.util
import logging
import os
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from in_process import Crash, report

from lockstep.config import environment
from lockstep.config.checks import check
from lockstep.config.compose import compose_config
from lockstep.errors import Preempted, UserError
from lockstep.reporting import mlflow_logger

SEEN = "train/images_seen"


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs the extra `{package}`")


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


@pytest.mark.parametrize(("name", "package"), [("mlflow", "mlflow-skinny"), ("trackio", "trackio")])
def test_a_package_that_is_missing_is_said_without_torch(name, package, monkeypatch):
    cfg = compose_config("train", [f"logger=[csv,{name}]", "trainer.accelerator=cpu"])
    monkeypatch.setattr(environment, "installed", lambda module: module != name)
    (problem,) = check(cfg)
    assert problem.startswith(f"logger={name} needs the package {package}") and f"uv sync --extra {name}" in problem


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
@needs("mlflow")
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
    panels = {Path(each.path).name for each in client().list_artifacts(run.info.run_id, "panels")}
    assert {"confusion_matrix.png", "largest_losses.png"} <= panels
    (checkpoint,) = client().list_artifacts(run.info.run_id, "checkpoints")
    kept = client().download_artifacts(run.info.run_id, checkpoint.path)
    assert Path(kept).read_bytes() == Path("runs/sweep/3", found["checkpoint"]).read_bytes()


@needs("mlflow")
def test_mlflow_logs_beside_the_runs_when_its_server_is_away(tmp_path, no_server, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    place = {"runs_dir": tmp_path, "run": "a", "experiment_name": "e", "group": None, "tags": []}
    with caplog.at_level(logging.WARNING):
        made = mlflow_logger.mlflow(**place, tracking_uri=None, id="abc")
    assert made.options["tracking_uri"] == f"sqlite:///{tmp_path}/mlflow.db"
    assert "127.0.0.1:9 cannot be reached" in caplog.text
    assert not list(tmp_path.iterdir())  # it connects when the run begins


@pytest.mark.slow  # the import of MLflow
@needs("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_an_address_that_is_no_server_of_mlflow_is_refused(train, no_server, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    with pytest.raises(UserError, match=r"logger.mlflow: MLflow cannot start: .*tracking_uri=null"):
        train("run=a", "logger=mlflow", f"logger.mlflow.tracking_uri=http://127.0.0.1:{server.server_address[1]}")
    server.shutdown()
    server.server_close()
    assert not Path("runs/a").exists()


# --- Trackio ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs("trackio")
@pytest.mark.filterwarnings("ignore")
def test_trackio_has_everything_when_it_is_read_back_and_a_resumed_run_is_the_same(train, stop, monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="Trackio cannot start: Self-hosted logging requires a write token"):
        train("run=b", "logger=trackio", "logger.trackio.server_url=http://127.0.0.1:9")
    assert not Path("runs/b").exists()
    from trackio.sqlite_storage import SQLiteStorage as Storage

    common = ["run=sweep/3", "logger=trackio", "trainer.log_every_n_steps=4", "checkpoint.every_n_steps=4"]
    stop(Crash("my bug"))
    with pytest.raises(Crash):
        train(*common)
    (alert,) = Storage.get_alerts("lockstep")
    assert (alert["title"], "my bug" in alert["text"]) == ("failed", True)
    found = train(*common, "resume=auto", "logger.trackio.log_model=true", "trainer.max_epochs=2")
    (run,) = Storage.get_run_records("lockstep")
    config = Storage.get_run_config("lockstep", run["name"])
    assert (config["_Group"], config["optim"]["lr"]) == ("sweep", 1e-3)
    logs = Storage.get_logs("lockstep", run["name"])
    tested = next(row for row in logs if "test/acc" in row)
    assert (tested["step"], tested[SEEN]) == (24, 24 * 48)
    assert tested["test/acc"] == pytest.approx(found["test/acc"])
    media = {name: row[name] for row in logs for name in row if name.startswith("panels/")}
    assert {"panels/confusion_matrix", "panels/largest_losses"} <= set(media)
    assert report("sweep/3")["status"] == "done"
    (artifact,) = Storage.get_artifacts("lockstep")
    size = Path("runs/sweep/3", found["checkpoint"]).stat().st_size
    assert (artifact["name"], artifact["type"], artifact["size_bytes"]) == ("model-sweep-3", "model", size)
    assert len(Storage.get_alerts("lockstep")) == 1
