"""What a run hands its loggers, read back by their own readers or from their clients' files."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import wandb
from in_process import Crash, report, rows
from lightning.pytorch.loggers.logger import Logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lockstep
from lockstep.build_trainer import labels
from lockstep.config.compose import compose_config
from lockstep.config.settings import Settings
from lockstep.errors import Preempted, UserError
from lockstep.reporting import loggers
from lockstep.reporting.loggers import RunEnd, flat

SEEN = "train/images_seen"


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
def kept(monkeypatch) -> Kept:
    made = Kept()

    def kept_logger() -> Logger:
        return made

    kept_logger.__module__ = "lockstep.reporting.loggers"  # a config may name it
    monkeypatch.setattr(loggers, "tensorboard", kept_logger)
    return made


# --- any logger ------------------------------------------------------------------------------------------------------


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
    ("run", "experiment", "given", "group", "tags"),
    [
        ("a", None, [], None, ["basic_net", "mnist", "single"]),
        ("sweep/3", "fast", [], "sweep", ["fast", "basic_net", "mnist", "single"]),
        ("sweep/3", "fast", ["logger.wandb.group=g", "logger.wandb.tags=[mine]"], None, None),
        ("a", "fast", ["logger.wandb.tags=[mine,auto]"], None, ["fast", "mine", "basic_net", "mnist", "single"]),
        ("a", None, ["logger.wandb.tags=[]"], None, None),
    ],
)
def test_a_sweep_is_the_group_and_choices_are_tags(run, experiment, given, group, tags):
    cfg = compose_config("train", ["logger=[csv,wandb]", f"run={run}", "trainer.accelerator=cpu", *given])
    for _ in range(2):  # typed again, to resume
        cfg = Settings.of(cfg).identified(None, experiment).cfg
    made = labels(Settings.of(cfg), cfg.logger.wandb)
    assert (made.get("group"), made.get("tags")) == (group, tags)
    assert not labels(Settings.of(cfg), cfg.logger.csv)


def test_keys_are_flat_and_values_plain():
    config = {"a": {"b": 1, "c": {"d": None}}, "e": [1, 2], "f": True, 3: "x", "empty": {}}
    assert flat(config) == {"a.b": 1, "a.c.d": "None", "e": "[1, 2]", "f": True, "3": "x"}


# --- TensorBoard -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tensorboard_has_everything_when_it_is_read_back(train, monkeypatch):
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
    texts = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("config/text_summary")]
    assert "| data.batch_size | 48 |" in texts[0].splitlines()
    assert [e.tensor_proto.string_val[0] for e in events.Tensors("status/text_summary")][-1] == b"done"
    row = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"optim.lr" in row and events.SummaryMetadata("_hparams_/session_end_info")


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


def values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.fixture
def client(tmp_path, monkeypatch):
    """W&B's client, with folders of its own below `tmp_path`."""
    for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb-client"))
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.slow
def test_wandb_has_everything_in_its_files_and_a_resumed_run_is_the_same(train, client):
    common = ["logger=wandb", "trainer.log_every_n_steps=4", "experiment=mnist_basic_net"]
    train("run=sweep/3", *common, "trainer.max_epochs=1", "trainer.max_steps=8")
    found = train("run=sweep/3", *common, "trainer.max_epochs=1", "resume=auto", "logger.wandb.log_model=true")
    first, second = runs_of_wandb("sweep/3")
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
    summary = {k: v for record in of(second, "summary") for k, v in values(record.update).items()}
    assert summary["status"] == "done"
    assert [record.exit_code for record in of(second, "exit")] == [0]


@pytest.mark.parametrize(
    ("raised", "status", "code"), [(Crash("my bug"), "failed", 1), (Preempted("a warning"), "preempted", 1), (KeyboardInterrupt(), "interrupted", 255)]
)  # fmt: skip
def test_loggers_are_told_how_a_run_ended(train, kept, client, monkeypatch, raised, status, code):
    from lockstep.callbacks import FiniteLoss

    def stop(*_):
        raise raised

    monkeypatch.setattr(FiniteLoss, "on_train_batch_end", stop)
    with pytest.raises((type(raised), SystemExit)):
        train("run=a", "logger=[tensorboard,wandb]")
    error = report("a")["error"]
    assert (report("a")["status"], str(raised) in error) == (status, True)
    assert kept.of("on_run_end") == [(RunEnd(status, error, 0, None, (), None),)]
    (run,) = runs_of_wandb("a")
    assert [record.exit_code for record in of(run, "exit")] == [code]
    assert bool(of(run, "preempting")) is (status == "preempted")
    summary = {k: v for record in of(run, "summary") for k, v in values(record.update).items()}
    assert (summary["status"], summary["error"]) == (status, error)


def test_a_run_that_wandb_refuses_leaves_nothing(train, client, monkeypatch):
    monkeypatch.setattr(wandb, "init", Mock(side_effect=wandb.errors.UsageError("API key must have 40+ characters")))
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    with pytest.raises(UserError, match=r"logger\.wandb cannot start: API key .*WANDB_API_KEY.*mode=offline") as error:
        train("run=a", "logger=wandb", "logger.wandb.mode=online")
    assert "secret" not in str(error.value)
    assert not Path("runs/a").exists()
