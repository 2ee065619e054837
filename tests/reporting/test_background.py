"""A logger's server that fails, or accepts and never answers, neither stops nor slows a run."""

import json
import logging
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import wandb
from in_process import rows
from lightning.pytorch.loggers.logger import Logger

from lockstep.reporting import loggers
from lockstep.reporting.loggers import Background
from lockstep.run.folder import RunFolder

ANSWERED = 3  # requests with figures, before the server goes away


class Server(ThreadingHTTPServer):
    """Answers the first requests with figures. Then it is gone, or accepts requests and never answers."""

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


def logger_of_the_server() -> Logger:
    return ToServer()


logger_of_the_server.__module__ = "lockstep.reporting.loggers"  # a config may name it


def test_a_run_goes_on_without_the_server_of_its_logger(train, server, monkeypatch, caplog):
    monkeypatch.setattr(loggers, "tensorboard", logger_of_the_server)
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


def test_an_error_of_the_users_own_is_raised(tmp_path):
    class Buggy(ToServer):
        def log_metrics(self, metrics, step=None) -> None:
            raise KeyError("my bug")

    logger = Buggy()
    worker = Background(logger, "mine")
    logger.log_metrics({})
    worker.calls.put(lambda: None)
    deadline = time.monotonic() + 10
    while worker.bug is None and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(KeyError, match="my bug"):
        logger.log_metrics({})
    worker.finish(10)


def test_a_bug_in_one_logger_keeps_no_other_from_its_end(tmp_path, caplog):
    class Buggy(ToServer):
        def on_run_end(self, end) -> None:
            raise KeyError("my bug")

    class Fine(ToServer):
        ends = []  # noqa: RUF012

        def on_run_end(self, end) -> None:
            self.ends.append(end.status)

    begun = [Background(Buggy(), "buggy"), Background(Fine(), "fine")]
    begun[0].bug = KeyError("my bug")  # of an earlier call
    folder = RunFolder(tmp_path)
    with pytest.raises(KeyError, match="my bug"):
        loggers.end_run(begun, {"status": "done"}, [], folder)
    begun = [Background(Buggy(), "buggy"), Background(Fine(), "fine")]
    begun[0].bug = KeyError("my bug")
    loggers.end_run(begun, {"status": "failed"}, [], folder)  # what ended the run is reported instead
    assert Fine.ends == ["done", "failed"]
    assert "logger.buggy failed" in caplog.text


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


@pytest.mark.slow
def test_a_run_goes_on_without_the_server_of_wandb(train, server, monkeypatch, tmp_path):
    wandb.teardown()  # a test before this one in the same process may have set the client up, for a different server
    monkeypatch.setattr(loggers, "LATE_S", 1.0)
    for name, value in {
        "BASE_URL": server.url, "API_KEY": "0" * 40, "MODE": "online", "ERROR_REPORTING": "false",
        **dict.fromkeys(("CONFIG_DIR", "CACHE_DIR", "DATA_DIR"), str(tmp_path / "client")),
    }.items():  # fmt: skip
        monkeypatch.setenv(f"WANDB_{name}", value)
    server.answered = ANSWERED - 1
    try:
        found = train("run=a", "logger=wandb", "trainer.log_every_n_steps=1", "trainer.max_epochs=3")
    finally:
        wandb.teardown()
    assert (found["status"], server.answered >= ANSWERED) == ("done", True)
    assert len([row for row in rows("a") if row["train/loss"]]) == 36
    (kept,) = (tmp_path / "runs/a/wandb").glob("run-*/*.wandb")
    assert b"test/acc" in kept.read_bytes()
