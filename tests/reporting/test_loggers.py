"""Where metrics go: metrics.csv loses no row; TensorBoard, W&B and MLflow have everything when they are read back; a server that fails,
or accepts and never answers, neither stops nor slows a run."""

import csv
import importlib.util
import json
import logging
import os
import re
import shlex
import struct
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import wandb
from forked import until
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import Crash, report, rows
from lightning.pytorch.loggers.logger import Logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lockstep
from lockstep.callbacks import FiniteLoss
from lockstep.config.checks import resolve
from lockstep.errors import Preempted, UserError
from lockstep.extras import mlflow_logger
from lockstep.machine import world
from lockstep.reporting import loggers
from lockstep.reporting.loggers import Background, MetricsCsv, RunEnd, wandb_sync_line
from lockstep.run import RunFolder

SEEN = "train/images_seen"
NAMES = st.sampled_from(["train/loss", "val/acc", "val/loss", "lr", "a,b", 'c"d'])
ROWS = st.lists(st.dictionaries(NAMES, st.floats(allow_nan=False), min_size=1), min_size=1, max_size=8)


@pytest.fixture
def no_proxy(monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


# --- metrics.csv -----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, restarts=st.sets(st.integers(0, 8)))
def test_all_that_was_logged_is_read_back_however_often_the_run_was_restarted(tmp_path_factory, rows, restarts):
    folder = tmp_path_factory.mktemp("run")
    logger = MetricsCsv(folder)
    for step, row in enumerate(rows):
        if step in restarts:
            logger = MetricsCsv(folder)
        logger.log_metrics(row, step=step)
    assert RunFolder(folder).metrics() == [{"step": step, **row} for step, row in enumerate(rows)]
    with (folder / "metrics.csv").open(newline="") as file:  # a new metric is a new column, after those before
        assert next(csv.reader(file)) == list(dict.fromkeys(["step", *(name for row in rows for name in row)]))


@pytest.mark.parametrize("steps", [0, 9, 15])
@pytest.mark.parametrize("torn", [False, True])
def test_rows_that_a_resumed_run_writes_again_are_dropped(tmp_path, steps, torn):
    """And what is left of the last one, if a kill cut it off."""
    logger, path = MetricsCsv(tmp_path), tmp_path / "metrics.csv"
    RunFolder(tmp_path).truncate_logs(steps)
    assert not list(tmp_path.iterdir())  # before anything was logged
    for step in range(7, 12):
        logger.log_metrics({"train/loss": 0.5 + step}, step=step)
    if torn:
        path.write_bytes(path.read_bytes()[: -len("1,11.5\r\n")])
        logger = MetricsCsv(tmp_path)
    RunFolder(tmp_path).truncate_logs(steps)
    kept = [{"step": step, "train/loss": 0.5 + step} for step in range(7, min(steps, 11 - torn) + 1)]
    assert RunFolder(tmp_path).metrics() == kept
    logger.log_metrics({"train/loss": 0.5, "lr": 0.25}, step=steps + 1)
    assert RunFolder(tmp_path).metrics() == [*kept, {"step": steps + 1, "train/loss": 0.5, "lr": 0.25}]
    assert list(tmp_path.iterdir()) == [path]


# --- any logger ------------------------------------------------------------------------------------------------------


class Kept(Logger):
    """Keeps what it is handed, in `calls`."""

    name, version = "kept", ""
    log_hyperparams = log_metrics = None

    def __init__(self) -> None:
        super().__init__()
        self.calls = Mock()
        for method in ("log_hyperparams", "log_metrics", "on_run_end", "finalize"):
            setattr(self, method, getattr(self.calls, method))

    @property
    def end(self) -> RunEnd:
        (call,) = self.calls.on_run_end.call_args_list
        return call.args[0]


@pytest.fixture
def kept(monkeypatch) -> Kept:
    """What `logger=tensorboard` is then: a config may name only what is shipped."""
    logger = Kept()

    def made() -> Kept:
        return logger

    made.__module__ = "lockstep.reporting.loggers"
    monkeypatch.setattr(loggers, "tensorboard", made)
    return logger


def test_a_logger_gets_config_metrics_page_checkpoint_and_status(train, kept):
    found = train("run=a", "logger=tensorboard", "trainer.log_every_n_steps=4", "loader.limit_train=100")
    config = kept.calls.log_hyperparams.call_args_list[0].args[0]
    assert (config["optim"]["lr"], config["run"], config["facts"]["git_sha"]) == (1e-3, "a", found["git_sha"])
    logged = [(metrics[SEEN], step) for (metrics, step), _ in kept.calls.log_metrics.call_args_list]
    steps = found["train/steps"]
    assert logged[-1] == (steps * 48, steps)  # the test
    assert all(seen == 48 * step for seen, step in logged)
    assert SEEN not in rows("a")[0]
    assert (kept.end.status, kept.end.error, kept.end.step) == ("done", None, steps)
    assert kept.end.checkpoint == Path("runs/a", found["checkpoint"])
    assert {panel.title for panel in kept.end.panels} == set(lockstep.load_report("a").panels)
    assert "Confusion matrix" in kept.end.page.read_text()
    assert [name for name, *_ in kept.calls.method_calls[-2:]] == ["on_run_end", "finalize"]


# --- TensorBoard -----------------------------------------------------------------------------------------------------


def test_tensorboard_has_everything_and_each_step_once_after_a_crash(train, crash_at):
    typed = ["run=a", "logger=tensorboard", "trainer.log_every_n_steps=1", "checkpoint.every_n_steps=4"]
    crash_at(7)
    with pytest.raises(Crash):
        train(*typed)
    crash_at(-1)
    found = train(*typed, "resume=auto")
    events = EventAccumulator("runs/a/tensorboard", size_guidance={"images": 0, "tensors": 0}).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 13))
    assert [(e.step, e.value) for e in events.Scalars(SEEN)][-1] == (12, 12 * 48)
    assert events.Scalars("val/acc") and events.Scalars("test/acc")[-1].value == pytest.approx(found["test/acc"])
    page, status = (
        events.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode() for name in ("report", "status")
    )
    assert ("runs/a/report.html" in page, status) == (True, "done")
    row = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"optim.lr" in row


# --- a server that fails ---------------------------------------------------------------------------------------------

ANSWERED = 3  # requests with metrics, before the server goes away
# What W&B's client must hear to begin a run and to end it, whatever it asks.
PROJECT = {"id": "1", "name": "lockstep", "entity": {"id": "1", "name": "me"}}
RUN = {"id": "1", "name": "abc", "config": "{}", "project": PROJECT}
OF_WANDB = {
    "upsertBucket": {"bucket": RUN, "inserted": True},
    "createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []},
}


class Handler(BaseHTTPRequestHandler):
    """Answers the first requests with metrics. Then the server is gone, or accepts requests and never answers."""

    def do_POST(self) -> None:
        server = self.server
        self.rfile.read(int(self.headers["Content-Length"]))
        if server.answered >= ANSWERED and server.how == "hangs":
            server.over.wait(60)
            return
        server.answered += self.path != "/graphql"
        content = json.dumps({"data": OF_WANDB}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        if server.answered >= ANSWERED and server.how == "dies":
            threading.Thread(target=close, args=[server]).start()

    do_PUT = do_POST

    def log_message(self, *_) -> None:
        pass


def close(server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()


def address(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    close(server)


@pytest.fixture(params=["hangs", "dies"])
def server(request):
    with serving(Handler) as server:
        server.how, server.answered, server.over = request.param, 0, threading.Event()
        yield server
        server.over.set()


def test_a_run_goes_on_without_the_server_of_its_logger(train, server, kept, monkeypatch, caplog):
    def post(metrics, step=None) -> None:
        urllib.request.urlopen(address(server), str(metrics).encode()).read()

    kept.log_metrics = post
    if server.how == "hangs":
        monkeypatch.setattr(loggers, "LATE_S", 0.2)
    found = train("run=a", "logger=[tensorboard]", "trainer.log_every_n_steps=1")
    assert (found["status"], server.answered >= ANSWERED) == ("done", True)
    assert len([row for row in rows("a") if row["train/loss"]]) == 12
    (said,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("logger.tensorboard")]
    # a connection that waited as the server closed is reset; a later one is refused, a URLError
    what = "does not respond" if server.how == "hangs" else "failed with (URLError|ConnectionResetError)"
    assert re.search(what, said) and "metrics.csv has all metrics" in said


def background(logger: Logger, name: str) -> Background:
    made = Background(logger, name, resolve([]), {"batch_size": None, "unit": "samples"})
    made.start()
    return made


@pytest.mark.parametrize("status", ["done", "failed"])
def test_a_bug_in_a_logger_is_told_and_keeps_no_other_from_its_end(status, tmp_path, caplog):
    def bug(*_) -> None:
        raise KeyError("my bug")

    fine, buggy = Kept(), Kept()
    buggy.log_metrics = bug
    begun = [background(buggy, "buggy"), background(fine, "fine")]
    buggy.log_metrics({})
    until(lambda: begun[0].warned)
    buggy.log_metrics({})
    loggers.end_run(begun, RunFolder(tmp_path), {"status": status}, [])
    assert fine.end.status == buggy.end.status == status
    assert "logger.buggy failed with KeyError: 'my bug'" in caplog.text and "in bug" in caplog.text  # its line of code


# --- W&B -------------------------------------------------------------------------------------------------------------


def records(path: Path) -> Iterator[Any]:
    """What W&B's client wrote: messages of its protocol in the log format of LevelDB, after a head of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # no head fits into the rest of a block
            place += 32768 - place % 32768
            continue
        size, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        whole += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # the whole, or its last part
            yield Record.FromString(whole)
            whole = b""


def runs_of_wandb(run: str) -> list[list[Any]]:
    """One for each time that it was started."""
    wandb.teardown()  # its process writes the files to the end
    return [list(records(path)) for path in sorted(Path("runs", run, "wandb").glob("offline-run-*/*.wandb"))]


def of(run: list[Any], kind: str) -> list[Any]:
    return [getattr(record, kind) for record in run if record.WhichOneof("record_type") == kind]


def summary(run: list[Any]) -> dict[str, Any]:
    return {key: value for record in of(run, "summary") for key, value in values(record.update).items()}


def values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.fixture
def client(tmp_path, monkeypatch):
    """W&B's client without a key, with folders of its own below `tmp_path`."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb-client"))
    wandb.teardown()  # it keeps a process and the settings of its first use, maybe another test's
    yield
    wandb.teardown()


def logger_of_wandb(run_dir: Path, mode: str = "auto"):
    place = {"run_dir": run_dir, "run": "a-run", "project": "lockstep", "entity": None, "group": None}
    return loggers.wandb(**place, tags=["one"], id="abc123", mode=mode)


KEY, ELSEWHERE = {"API_KEY": "0" * 40}, {"BASE_URL": "https://wandb.example.org"}
LOGIN = f"\n  login user\n  password {'0' * 40}\n"


@pytest.mark.parametrize(
    ("typed", "variables", "netrc", "expected"),
    [
        ("auto", {}, "", "offline"),
        ("auto", KEY, "", "online"),
        ("auto", {**KEY, "MODE": "disabled"}, "", "disabled"),
        ("auto", {"MODE": "online"}, "", "online"),
        ("offline", KEY, "", "offline"),
        ("online", {}, "", "online"),
        ("auto", {}, f"machine api.wandb.ai{LOGIN}", "online"),
        ("auto", {}, f"machine github.com{LOGIN}", "offline"),
        ("auto", {}, "machine api.wandb.ai\n  login user\n", "offline"),
        ("auto", {}, "this is no netrc file", "offline"),
        ("auto", ELSEWHERE, f"machine wandb.example.org{LOGIN}", "online"),
        ("auto", ELSEWHERE, f"machine api.wandb.ai{LOGIN}", "offline"),
    ],
)
def test_the_mode_is_what_was_said_or_follows_from_a_key_where_the_client_looks(
    tmp_path, client, monkeypatch, typed, variables, netrc, expected
):
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    (tmp_path / "netrc").write_text(netrc)
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setattr(loggers, "unreachable", lambda _: "")
    assert logger_of_wandb(tmp_path, typed)._wandb_init["mode"] == expected


def test_without_a_network_a_key_does_not_stop_the_run(tmp_path, client, no_proxy, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setattr(world.socket, "create_connection", Mock(side_effect=OSError("Network is unreachable")))
    assert logger_of_wandb(tmp_path)._wandb_init["mode"] == "offline"
    assert "api.wandb.ai cannot be reached (Network is unreachable)" in caplog.text


def test_every_part_of_an_offline_run_that_was_resumed_is_synced(tmp_path):
    parts = [tmp_path / "my run" / "wandb" / f"offline-run-2025010{day}_000000-abc123" for day in (1, 2, 3)]
    (tmp_path / "my run" / "wandb" / "run-20250101_000000-abc123").mkdir(parents=True)  # it was online
    assert wandb_sync_line(tmp_path / "my run") is None
    for part in reversed(parts):
        part.mkdir()
    assert shlex.split(wandb_sync_line(tmp_path / "my run")) == ["wandb", "sync", *map(str, parts)]


@pytest.mark.parametrize(("typed", "told"), [
    ("logger=wandb", "logger.wandb cannot start: Input should be"),
    ("logger=mlflow", r"logger=mlflow needs mlflow-skinny\. Run uv sync --extra mlflow"),
    ("logger=wandb logger.wandb.mode=offline logger.wandb.log_model=true trainer.enable_checkpointing=false",
     "logger.wandb.log_model has no effect with trainer.enable_checkpointing=false"),
])  # fmt: skip
def test_what_a_logger_lacks_is_told_and_leaves_nothing(train, monkeypatch, typed, told):
    monkeypatch.setenv("WANDB_MODE", "onlin")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match=told):
        train("run=a", *typed.split())
    assert not Path("runs/a").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (Crash("my bug"), "failed", 1),
        (KeyboardInterrupt(), "interrupted", 255),
    ],
)
def test_loggers_are_told_how_a_run_ended(train, kept, client, monkeypatch, raised, status, code):
    def fail(self, trainer, *_) -> None:
        if trainer.global_step == 2:  # the loggers begin after the first step
            raise raised

    monkeypatch.setattr(FiniteLoss, "on_train_batch_end", fail)
    with pytest.raises((type(raised), SystemExit)):
        train("run=a", "logger=[tensorboard,wandb]", "logger.wandb.group=g", "logger.wandb.tags=[mine,auto]")
    error = report("a")["error"]
    assert (kept.end, str(raised) in error) == (RunEnd(status, error, 0), True)
    (run,) = runs_of_wandb("a")
    begun = of(run, "run")[0]
    assert (begun.run_group, list(begun.tags)) == ("g", ["mine", "basic_net", "mnist", "single"])
    assert [record.exit_code for record in of(run, "exit")] == [code]
    assert (summary(run)["status"], summary(run)["error"]) == (status, error)


def test_a_run_that_wandb_refuses_leaves_nothing(train, client, monkeypatch):
    monkeypatch.setattr(wandb, "init", Mock(side_effect=wandb.errors.UsageError("API key must have 40+ characters")))
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    with pytest.raises(UserError, match=r"logger\.wandb cannot start: API key must") as error:
        train("run=a", "logger=wandb", "logger.wandb.mode=online")
    assert "secret" not in str(error.value)
    assert not Path("runs/a").exists()


@pytest.mark.slow
def test_a_run_goes_on_without_the_server_of_wandb(train, server, client, monkeypatch, tmp_path):
    monkeypatch.setattr(loggers, "LATE_S", 1.0)
    for name, value in {"BASE_URL": address(server), "API_KEY": "0" * 40, "MODE": "online"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    server.answered = ANSWERED - 1
    found = train("run=a", "logger=wandb", "trainer.log_every_n_steps=1", "trainer.max_epochs=3")
    wandb.teardown()
    assert (found["status"], server.answered >= ANSWERED) == ("done", True)
    assert len([row for row in rows("a") if row["train/loss"]]) == 36
    (kept,) = (tmp_path / "runs/a/wandb").glob("run-*/*.wandb")
    assert b"test/acc" in kept.read_bytes()


# --- MLflow, read back by its own client -----------------------------------------------------------------------------

needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs the extra `mlflow`")


@pytest.fixture
def no_server(no_proxy, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.mark.slow
@needs_mlflow
@pytest.mark.filterwarnings("ignore")
def test_wandb_and_mlflow_have_everything_when_they_are_read_back_and_a_resumed_run_is_the_same(
    train, client, no_server, monkeypatch
):
    from mlflow.tracking import MlflowClient

    def stop(self, trainer, *_) -> None:
        if trainer.global_step == 5:
            raise Preempted("a warning")

    common = ["run=sweep/3", "experiment=mnist_basic_net", "logger=[wandb,mlflow]", "logger.wandb.log_model=true",
              "logger.mlflow.log_model=true", "trainer.log_every_n_steps=4", "checkpoint.every_n_steps=4"]  # fmt: skip
    with monkeypatch.context() as patch, pytest.raises(Preempted):
        patch.setattr(FiniteLoss, "on_train_batch_end", stop)
        train(*common, "trainer.max_epochs=1")
    mlflow = MlflowClient(f"sqlite:///{Path('runs/mlflow.db').resolve()}")
    (run,) = mlflow.search_runs(["1"])
    assert (run.info.status, run.data.tags["status"]) == ("KILLED", "preempted")
    assert not mlflow.list_artifacts(run.info.run_id, "checkpoints")
    found = train(*common, "trainer.max_epochs=2", "resume=auto")
    page, tags = Path("runs/sweep/3/report.html").read_text(), ["mnist_basic_net", "basic_net", "mnist", "single"]

    first, second = runs_of_wandb("sweep/3")
    assert [record.exit_code for record in of(first, "exit")] == [1] and of(first, "preempting")
    begun = of(second, "run")[0]
    assert begun.run_id == of(first, "run")[0].run_id
    assert (begun.run_group, begun.display_name, list(begun.tags)) == ("sweep", "sweep/3", tags)
    config: dict[str, Any] = {}
    for record in [*of(second, "run"), *of(second, "config")]:
        config |= values(getattr(record, "config", record).update)
    assert (config["optim"]["lr"], config["facts"]["world_size"]) == (1e-3, 1)
    tested = next(row for row in (values(row.item) for row in of(second, "history")) if "test/acc" in row)
    assert (tested["trainer/global_step"], tested[SEEN]) == (24, 24 * 48)
    assert tested["test/acc"] == pytest.approx(found["test/acc"])
    pages = Path("runs/sweep/3/wandb").glob("offline-run-*/files/media/html/report*.html")
    assert page in [each.read_text() for each in pages]
    logged = [record.artifact for record in of(second, "request") if record.HasField("log_artifact")]
    (artifact,) = logged or of(second, "artifact")
    assert (artifact.name, artifact.type) == (f"model-{begun.run_id}", "model")
    assert summary(second)["status"] == "done"
    assert [record.exit_code for record in of(second, "exit")] == [0]

    (again,) = mlflow.search_runs(["1"])
    assert again.info.run_id == run.info.run_id
    assert (again.info.status, again.info.run_name, again.data.tags["status"]) == ("FINISHED", "sweep/3", "done")
    assert (again.data.tags["group"], again.data.tags["tags"]) == ("sweep", ", ".join(tags))
    assert (again.data.params["optim.lr"], again.data.tags["resumed.trainer.max_epochs"]) == ("0.001", "2")
    history = mlflow.get_metric_history(run.info.run_id, SEEN)
    assert (history[-1].step, history[-1].value) == (24, 24 * 48)
    assert again.data.metrics["test/acc"] == pytest.approx(found["test/acc"])
    assert Path(mlflow.download_artifacts(run.info.run_id, "report.html")).read_text() == page
    (checkpoint,) = mlflow.list_artifacts(run.info.run_id, "checkpoints")
    kept = Path(mlflow.download_artifacts(run.info.run_id, checkpoint.path))
    assert kept.read_bytes() == Path("runs/sweep/3", found["checkpoint"]).read_bytes()


@needs_mlflow
def test_mlflow_logs_beside_the_runs_when_its_server_is_away(tmp_path, no_server, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    place = {"runs_dir": tmp_path, "run": "a", "experiment_name": "e", "group": None, "tags": []}
    with caplog.at_level(logging.WARNING):
        made = mlflow_logger.MLflow(**place, tracking_uri=None, id="abc")
    assert made.options["tracking_uri"] == f"sqlite:///{tmp_path}/mlflow.db"
    assert "127.0.0.1:9 cannot be reached" in caplog.text
    assert not list(tmp_path.iterdir())  # it connects when the run begins


@pytest.mark.slow  # the import of MLflow
@needs_mlflow
@pytest.mark.filterwarnings("ignore")
def test_an_address_that_is_no_server_of_mlflow_is_refused(train, no_server):
    refused = pytest.raises(UserError, match=r"logger\.mlflow cannot start: ")
    with serving(SimpleHTTPRequestHandler) as server, refused:
        train("run=a", "logger=mlflow", f"logger.mlflow.tracking_uri={address(server)}")
    assert not Path("runs/a").exists()
