"""Where metrics go: metrics.csv loses no row; TensorBoard, W&B and MLflow have everything when they are read back; a server that fails,
or accepts and never answers, neither stops nor slows a run."""

import csv
import importlib.util
import json
import logging
import os
import shlex
import struct
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import wandb
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import Crash, report, rows
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lockstep
from lockstep.build_trainer import labels
from lockstep.callbacks import FiniteLoss
from lockstep.config.checks import check
from lockstep.config.compose import compose_config
from lockstep.config.settings import Settings
from lockstep.errors import Preempted, UserError
from lockstep.extras import mlflow_logger
from lockstep.launch import resuming
from lockstep.reporting import loggers
from lockstep.reporting.loggers import Background, MetricsCsv, RunEnd, wandb_sync_line
from lockstep.run.folder import RunFolder

SEEN = "train/images_seen"
NAMES = st.sampled_from(["train/loss", "val/acc", "val/loss", "lr", "a,b", 'c"d'])
ROWS = st.lists(st.dictionaries(NAMES, st.floats(allow_nan=False), min_size=1), min_size=1, max_size=8)


@pytest.fixture
def no_proxy(monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture
def as_logger(monkeypatch):
    """`logger=tensorboard` is the given logger then: a config may name only what is shipped."""

    def replace(logger: Logger) -> Logger:
        def made() -> Logger:
            return logger

        made.__module__ = "lockstep.reporting.loggers"
        monkeypatch.setattr(loggers, "tensorboard", made)
        return logger

    return replace


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


@pytest.mark.parametrize("steps", [0, 3, 9])
@pytest.mark.parametrize("anew", [False, True])
def test_rows_that_a_resumed_run_writes_again_are_dropped(tmp_path, steps, anew):
    logger = MetricsCsv(tmp_path)
    RunFolder(tmp_path).cut(steps)
    assert not list(tmp_path.iterdir())  # before anything was logged
    for step in range(1, 6):
        logger.log_metrics({"train/loss": 10.0 - step}, step=step)
    logger = MetricsCsv(tmp_path) if anew else logger
    RunFolder(tmp_path).cut(steps)
    kept = [{"step": step, "train/loss": 10.0 - step} for step in range(1, min(steps, 5) + 1)]
    assert RunFolder(tmp_path).metrics() == kept
    logger.log_metrics({"train/loss": 0.5, "lr": 0.25}, step=steps + 1)
    logger.finalize("success")
    assert RunFolder(tmp_path).metrics() == [*kept, {"step": steps + 1, "train/loss": 0.5, "lr": 0.25}]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_the_test_of_a_run_that_is_continued_is_dropped(tmp_path):
    logger = MetricsCsv(tmp_path)
    rows = [{"epoch": 0, "train/loss": 1.0}, {"lr-SGD": 0.1}, {"epoch": 0, "val/acc": 0.5}]
    for row in [*rows, {"acc_of_test": 0.25, "val/acc": 0.5}]:
        logger.log_metrics(row, step=4)
    RunFolder(tmp_path).drop_tests(["acc_of_test", "val/acc"])
    assert RunFolder(tmp_path).metrics() == [{"step": 4, **row} for row in rows]


def test_only_rank_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    MetricsCsv(tmp_path).log_metrics({"train/loss": 1.0}, step=0)
    assert not list(tmp_path.iterdir())


# --- any logger ------------------------------------------------------------------------------------------------------


class Kept(Logger):
    """Keeps what it is handed."""

    name, version = "kept", ""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple]] = []
        for method in ("log_hyperparams", "log_metrics", "on_run_end", "finalize"):
            setattr(self, method, lambda *args, method=method: self.calls.append((method, args)))

    log_hyperparams = log_metrics = None

    def of(self, method: str) -> list[tuple]:
        return [args for name, args in self.calls if name == method]


@pytest.fixture
def kept(as_logger) -> Kept:
    return as_logger(Kept())


def test_a_logger_gets_config_metrics_page_checkpoint_and_status(train, kept):
    found = train("run=a", "logger=tensorboard", "trainer.log_every_n_steps=4", "data.limit_train=100")
    (config,) = kept.of("log_hyperparams")[0]
    assert (config["optim"]["lr"], config["run"], config["facts"]["git_sha"]) == (1e-3, "a", found["git_sha"])
    logged = [(metrics[SEEN], step) for metrics, step in kept.of("log_metrics")]
    steps = found["train/steps"]
    assert logged[-1] == (steps * 48, steps)  # the test
    assert all(seen == 48 * step for seen, step in logged)
    assert SEEN not in rows("a")[0]
    ((end,),) = kept.of("on_run_end")
    assert (end.status, end.error, end.step) == ("done", None, steps)
    assert end.checkpoint == Path("runs/a", found["checkpoint"])
    assert {panel.title for panel in end.panels} == set(lockstep.load_report("a").panels)
    assert "Confusion matrix" in end.page.read_text()
    assert [name for name, _ in kept.calls[-2:]] == ["on_run_end", "finalize"]


@pytest.mark.parametrize(
    ("run", "experiment", "typed", "group", "tags"),
    [
        ("a", None, [], None, ["basic_net", "mnist", "single"]),
        ("sweep/3", "fast", [], "sweep", ["fast", "basic_net", "mnist", "single"]),
        ("sweep/3", "fast", ["logger.wandb.group=g", "logger.wandb.tags=[mine]"], None, None),
        ("a", "fast", ["logger.wandb.tags=[mine,auto]"], None, ["fast", "mine", "basic_net", "mnist", "single"]),
        ("a", None, ["logger.wandb.tags=[]"], None, None),
    ],
)
def test_a_sweep_is_the_group_and_choices_are_tags(run, experiment, typed, group, tags):
    cfg = compose_config("train", ["logger=[csv,wandb]", f"run={run}", "trainer.accelerator=cpu", *typed])
    for _ in range(2):  # typed again, to resume
        cfg = Settings.of(cfg).identified(None, experiment).cfg
    made = labels(Settings.of(cfg), cfg.logger.wandb)
    assert (made.get("group"), made.get("tags")) == (group, tags)
    assert not labels(Settings.of(cfg), cfg.logger.csv)


def test_a_resumed_run_keeps_the_id_of_a_logger_of_any_name(tmp_path):
    logger = "+logger.mine={_target_: lightning.pytorch.loggers.WandbLogger, id: null}"
    cfg = compose_config("train", [logger, "run=a", "trainer.accelerator=cpu"])
    first = Settings.of(cfg).identified(None).cfg
    assert len(first.logger.mine.id) == 8
    OmegaConf.save(first, tmp_path / "config.yaml")
    assert resuming.same_identity(cfg, RunFolder(tmp_path)).logger.mine.id == first.logger.mine.id


# --- TensorBoard -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tensorboard_has_everything_when_it_is_read_back(train):
    train("run=a", "logger=tensorboard", "trainer.log_every_n_steps=4", "trainer.max_steps=8")
    train("run=a", "logger=tensorboard", "trainer.max_steps=12", "resume=auto", "trainer.log_every_n_steps=4")
    found = report("a")
    events = EventAccumulator("runs/a/tensorboard", size_guidance={"images": 0, "tensors": 0}).Reload()
    tags = events.Tags()
    assert {"train/loss", "val/acc", "test/acc", SEEN} <= set(tags["scalars"])
    assert [(e.step, e.value) for e in events.Scalars(SEEN)][-1] == (12, 12 * 48)
    assert [e.value for e in events.Scalars("test/acc")][-1] == pytest.approx(found["test/acc"])
    (tables,) = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("report/text_summary")][-1:]
    matrix = lockstep.load_report("a").panels["Confusion matrix"]
    assert f"| 9 | {' | '.join(map(str, matrix.values[9]))} |" in tables.splitlines()
    assert "runs/a/report.html" in tables
    assert [e.tensor_proto.string_val[0] for e in events.Tensors("status/text_summary")][-1] == b"done"
    row = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"optim.lr" in row and events.SummaryMetadata("_hparams_/session_end_info")


# --- a server that fails ---------------------------------------------------------------------------------------------

ANSWERED = 3  # requests with metrics, before the server goes away


class Server(ThreadingHTTPServer):
    """Answers the first requests with metrics. Then it is gone, or accepts requests and never answers."""

    daemon_threads = True

    def __init__(self, how: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.how, self.answered, self.over = how, 0, threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        server, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        if server.answered >= ANSWERED and server.how == "hangs":
            server.over.wait(60)
            return
        content = b"{}"
        if self.path == "/graphql":
            content = json.dumps({"data": self.of_wandb(json.loads(body))}).encode()
        else:
            server.answered += 1
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        if server.answered >= ANSWERED and server.how == "dies":
            threading.Thread(target=server.close).start()

    do_PUT = do_POST

    def of_wandb(self, query: dict[str, Any]) -> dict[str, Any]:
        """What W&B's client must hear to begin a run and to end it."""
        if "upsertBucket" in query["query"]:
            project = {"id": "1", "name": "lockstep", "entity": {"id": "1", "name": "me"}}
            bucket = {"id": "1", "name": "abc", "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in query["query"]:
            files = [{"name": name, "uploadUrl": f"{self.server.url}/{name}"} for name in query["variables"]["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        return {}

    def log_message(self, *_) -> None:
        pass


class ToServer(Logger):
    name, version, url = "server", "", ""

    def log_hyperparams(self, *_, **__) -> None:
        pass

    def log_metrics(self, metrics, step=None) -> None:
        urllib.request.urlopen(self.url, str(metrics).encode()).read()


@pytest.fixture(params=["hangs", "dies"])
def server(request, monkeypatch):
    made = Server(request.param)
    monkeypatch.setattr(ToServer, "url", made.url)
    yield made
    made.close()


def test_a_run_goes_on_without_the_server_of_its_logger(train, server, as_logger, monkeypatch, caplog):
    as_logger(ToServer())
    if server.how == "hangs":
        monkeypatch.setattr(loggers, "LATE_S", 0.2)
    found = train("run=a", "logger=[tensorboard]", "trainer.log_every_n_steps=1")
    assert (found["status"], server.answered >= ANSWERED) == ("done", True)
    assert len([row for row in rows("a") if row["train/loss"]]) == 12
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("logger.tensorboard")]
    # a connection that waited as the server closed is reset; a later one is refused, a URLError
    what = ["does not answer"] if server.how == "hangs" else ["fails with URLError", "fails with ConnectionResetError"]
    assert len(said) == 1
    assert any(text in said[0] for text in what) and "metrics.csv has all metrics" in said[0]


def test_a_bug_in_a_logger_is_raised_and_keeps_no_other_from_its_end(tmp_path, caplog):
    class Buggy(ToServer):
        def log_metrics(self, metrics, step=None) -> None:
            raise KeyError("my bug")

    def begun() -> tuple[Kept, list[Background]]:
        fine, buggy = Kept(), Background(Buggy(), "buggy")
        buggy.logger.log_metrics({})
        deadline = time.monotonic() + 10
        while buggy.bug is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return fine, [buggy, Background(fine, "fine")]

    _, (buggy, _) = begun()
    with pytest.raises(KeyError, match="my bug"):
        buggy.logger.log_metrics({})
    buggy.finish(10)
    for status in ("done", "failed"):
        fine, both = begun()
        both[0].logger.on_run_end = partial(both[0].add, lambda _: None)
        with pytest.raises(KeyError, match="my bug") if status == "done" else nullcontext():  # else what ended the run
            loggers.end_run(both, {"status": status}, [], RunFolder(tmp_path))
        assert [end.status for (end,) in fine.of("on_run_end")] == [status]
    assert "logger.buggy failed" in caplog.text


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


@pytest.mark.parametrize(
    ("typed", "variable", "key", "expected"),
    [
        ("auto", None, False, "offline"),
        ("auto", None, True, "online"),
        ("auto", "disabled", True, "disabled"),
        ("auto", "online", False, "online"),
        ("offline", None, True, "offline"),
        ("online", None, False, "online"),
    ],
)
def test_the_mode_is_what_was_said_or_follows_from_the_key(
    tmp_path, client, monkeypatch, typed, variable, key, expected
):
    monkeypatch.setenv("WANDB_MODE", variable or "")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40 if key else "")
    monkeypatch.setattr(loggers, "unreachable", lambda _: "")
    assert logger_of_wandb(tmp_path, typed)._wandb_init["mode"] == expected


LOGIN = f"\n  login user\n  password {'0' * 40}\n"


@pytest.mark.parametrize(
    ("server", "netrc", "expected"),
    [
        ("", f"machine api.wandb.ai{LOGIN}", "online"),
        ("", f"machine github.com{LOGIN}", "offline"),
        ("", "machine api.wandb.ai\n  login user\n", "offline"),
        ("", "this is no netrc file", "offline"),
        ("https://wandb.example.org", f"machine wandb.example.org{LOGIN}", "online"),
        ("https://wandb.example.org", f"machine api.wandb.ai{LOGIN}", "offline"),
    ],
)
def test_a_key_is_found_where_the_client_looks(tmp_path, client, monkeypatch, server, netrc, expected):
    monkeypatch.setenv("WANDB_BASE_URL", server)
    (tmp_path / "netrc").write_text(netrc)
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setattr(loggers, "unreachable", lambda _: "")
    assert loggers.wandb_mode() == expected


def test_without_a_network_a_key_does_not_stop_the_run(tmp_path, client, no_proxy, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setattr(loggers.socket, "create_connection", Mock(side_effect=OSError("Network is unreachable")))
    assert logger_of_wandb(tmp_path)._wandb_init["mode"] == "offline"
    assert "api.wandb.ai cannot be reached (Network is unreachable)" in caplog.text


@pytest.mark.parametrize("folder", ["runs/a", "my runs/a"])
def test_every_part_of_an_offline_run_that_was_resumed_is_synced(tmp_path, folder):
    (tmp_path / folder / "wandb" / "run-20250101_000000-abc123").mkdir(parents=True)  # it was online
    assert wandb_sync_line(tmp_path / folder) is None
    parts = [tmp_path / folder / "wandb" / f"offline-run-2025010{day}_000000-abc123" for day in (1, 2, 3)]
    for part in reversed(parts):
        part.mkdir()
    assert shlex.split(wandb_sync_line(tmp_path / folder)) == ["wandb", "sync", *map(str, parts)]


def test_a_mode_that_wandb_does_not_have_is_told_without_its_client(monkeypatch):
    cfg = compose_config("train", ["logger=[csv,wandb]", "trainer.accelerator=cpu"])
    monkeypatch.setenv("WANDB_MODE", "onlin")
    assert [problem.partition(" in ")[0] for problem in check(cfg)] == ["WANDB_MODE=onlin"]
    cfg.logger.wandb.mode = "offline"
    assert check(cfg) == []


@pytest.mark.slow
def test_wandb_has_everything_in_its_files_and_a_resumed_run_is_the_same(train, client):
    common = ["logger=wandb", "trainer.log_every_n_steps=4", "experiment=mnist_basic_net"]
    train("run=sweep/3", *common, "trainer.max_epochs=1", "trainer.max_steps=8")
    found = train("run=sweep/3", *common, "trainer.max_epochs=1", "resume=auto", "logger.wandb.log_model=true")
    first, second = runs_of_wandb("sweep/3")
    assert shlex.split(wandb_sync_line(Path("runs/sweep/3")))[:2] == ["wandb", "sync"]
    begun = of(second, "run")[0]
    assert begun.run_id == of(first, "run")[0].run_id
    assert (begun.run_group, begun.display_name) == ("sweep", "sweep/3")
    assert list(begun.tags) == ["mnist_basic_net", "basic_net", "mnist", "single"]
    config: dict[str, Any] = {}
    for record in [*of(second, "run"), *of(second, "config")]:
        config |= values(getattr(record, "config", record).update)
    assert (config["optim"]["lr"], config["facts"]["world_size"]) == (1e-3, 1)
    history = [values(row.item) for row in of(second, "history")]
    tested = next(row for row in history if "test/acc" in row)
    assert (tested["trainer/global_step"], tested[SEEN]) == (12, 12 * 48)
    assert tested["test/acc"] == pytest.approx(found["test/acc"])
    pages = Path("runs/sweep/3/wandb").glob("offline-run-*/files/media/html/report*.html")
    assert Path("runs/sweep/3/report.html").read_text() in [page.read_text() for page in pages]
    (artifact,) = [record.artifact for record in of(second, "request") if record.HasField("log_artifact")] or of(
        second, "artifact"
    )
    assert (artifact.name, artifact.type) == (f"model-{begun.run_id}", "model")
    assert summary(second)["status"] == "done"
    assert [record.exit_code for record in of(second, "exit")] == [0]


@pytest.mark.parametrize(
    ("raised", "status", "code"), [(Crash("my bug"), "failed", 1), (Preempted("a warning"), "preempted", 1), (KeyboardInterrupt(), "interrupted", 255)]
)  # fmt: skip
def test_loggers_are_told_how_a_run_ended(train, kept, client, monkeypatch, raised, status, code):
    monkeypatch.setattr(FiniteLoss, "on_train_batch_end", Mock(side_effect=raised))
    with pytest.raises((type(raised), SystemExit)):
        train("run=a", "logger=[tensorboard,wandb]")
    error = report("a")["error"]
    assert (report("a")["status"], str(raised) in error) == (status, True)
    assert kept.of("on_run_end") == [(RunEnd(status, error, 0),)]
    (run,) = runs_of_wandb("a")
    assert [record.exit_code for record in of(run, "exit")] == [code]
    assert bool(of(run, "preempting")) is (status == "preempted")
    assert (summary(run)["status"], summary(run)["error"]) == (status, error)


def test_a_run_that_wandb_refuses_leaves_nothing(train, client, monkeypatch):
    monkeypatch.setattr(wandb, "init", Mock(side_effect=wandb.errors.UsageError("API key must have 40+ characters")))
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    with pytest.raises(UserError, match=r"logger\.wandb cannot start: API key .*WANDB_API_KEY.*mode=offline") as error:
        train("run=a", "logger=wandb", "logger.wandb.mode=online")
    assert "secret" not in str(error.value)
    assert not Path("runs/a").exists()


@pytest.mark.slow
def test_a_run_goes_on_without_the_server_of_wandb(train, server, client, monkeypatch, tmp_path):
    monkeypatch.setattr(loggers, "LATE_S", 1.0)
    for name, value in {"BASE_URL": server.url, "API_KEY": "0" * 40, "MODE": "online"}.items():
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


def test_a_package_that_is_missing_is_said_without_torch(monkeypatch):
    cfg = compose_config("train", ["logger=[csv,mlflow]", "trainer.accelerator=cpu"])
    monkeypatch.setitem(sys.modules, "mlflow", None)
    (problem,) = check(cfg)
    assert problem.startswith("logger=mlflow needs the package mlflow-skinny") and "uv sync --extra mlflow" in problem


def test_an_upload_without_checkpoints_is_refused():
    typed = ["logger=[csv,wandb]", "logger.wandb.log_model=true", "trainer.enable_checkpointing=false"]
    (problem,) = check(compose_config("train", [*typed, "trainer.accelerator=cpu"]))
    assert problem.startswith("logger.wandb.log_model has no effect with trainer.enable_checkpointing=false")


@pytest.fixture
def no_server(no_proxy, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.mark.slow
@needs_mlflow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_everything_when_it_is_read_back_and_a_resumed_run_is_the_same(train, no_server, monkeypatch):
    from mlflow.tracking import MlflowClient

    def stop(self, trainer, *_) -> None:
        if trainer.global_step == 5:
            raise Preempted("a warning")

    common = ["run=sweep/3", "logger=mlflow", "trainer.log_every_n_steps=4", "checkpoint.every_n_steps=4"]
    with monkeypatch.context() as patch, pytest.raises(Preempted):
        patch.setattr(FiniteLoss, "on_train_batch_end", stop)
        train(*common, "logger.mlflow.log_model=true")
    client = MlflowClient(f"sqlite:///{Path('runs/mlflow.db').resolve()}")
    (run,) = client.search_runs(["1"])
    assert (run.info.status, run.data.tags["status"]) == ("KILLED", "preempted")
    assert not client.list_artifacts(run.info.run_id, "checkpoints")
    found = train(*common, "resume=auto", "logger.mlflow.log_model=true", "trainer.max_epochs=2")
    (again,) = client.search_runs(["1"])
    assert again.info.run_id == run.info.run_id
    assert (again.info.status, again.info.run_name, again.data.tags["status"]) == ("FINISHED", "sweep/3", "done")
    assert (again.data.tags["group"], again.data.tags["tags"]) == ("sweep", "basic_net, mnist, single")
    assert again.data.params["optim.lr"] == "0.001"
    assert again.data.tags["resumed.trainer.max_epochs"] == "2"
    history = client.get_metric_history(run.info.run_id, SEEN)
    assert (history[-1].step, history[-1].value) == (24, 24 * 48)
    assert again.data.metrics["test/acc"] == pytest.approx(found["test/acc"])
    page = client.download_artifacts(run.info.run_id, "report.html")
    assert Path(page).read_bytes() == Path("runs/sweep/3/report.html").read_bytes()
    (checkpoint,) = client.list_artifacts(run.info.run_id, "checkpoints")
    kept = client.download_artifacts(run.info.run_id, checkpoint.path)
    assert Path(kept).read_bytes() == Path("runs/sweep/3", found["checkpoint"]).read_bytes()


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
def test_an_address_that_is_no_server_of_mlflow_is_refused(train, no_server, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    with pytest.raises(UserError, match=r"logger.mlflow cannot start: .*tracking_uri=null"):
        train("run=a", "logger=mlflow", f"logger.mlflow.tracking_uri=http://127.0.0.1:{server.server_address[1]}")
    server.shutdown()
    server.server_close()
    assert not Path("runs/a").exists()


def test_calls_beyond_the_limit_are_dropped(monkeypatch, caplog):
    monkeypatch.setattr(loggers, "PENDING", 2)
    monkeypatch.setattr(loggers, "LATE_S", 0.05)
    gate, seen, logger = threading.Event(), [], ToServer()
    logger.log_metrics = lambda _, step: (gate.wait(10), seen.append(step))
    worker = Background(logger, "mine")
    with caplog.at_level(logging.WARNING):
        for step in range(20):
            logger.log_metrics({}, step)
    assert [record.getMessage().split(".")[1] for record in caplog.records] == ["mine does not keep up"]
    gate.set()
    worker.finish(10)
    assert seen[0] == 0 and len(seen) < 5
