"""What a run hands its loggers, read back by their own readers or from their clients' files."""

import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb
from in_process import Crash, report, rows
from lightning.pytorch.loggers.logger import Logger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.build_trainer import labels
from lockstep.config.compose import compose_config
from lockstep.config.identity import identify
from lockstep.errors import Preempted, UserError
from lockstep.reporting import loggers, panels
from lockstep.reporting.tracking import flat
from lockstep.tasks.panel import Bars, Gallery, Lines, Mask, Matrix, Points, Sample, Table

SEEN = "train/images_seen"
PANELS = {"panels/confusion_matrix", "panels/calibration", "panels/largest_losses", "panels/what_the_network_saw"}


class Kept(Logger):
    """Keeps what it is handed."""

    name, version = "kept", ""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple]] = []
        for method in ("log_hyperparams", "log_metrics", "log_pictures", "log_checkpoint", "end", "finalize"):
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


def test_a_logger_gets_config_figures_panels_checkpoint_and_status(train, kept):
    found = train("run=a", "logger=tensorboard", "trainer.log_every_n_steps=4", "data.limit_train=100")
    (config,) = kept.of("log_hyperparams")[0]
    assert (config["optim"]["lr"], config["run"], config["facts"]["git_sha"]) == (1e-3, "a", found["git_sha"])
    logged = [(metrics[SEEN], step) for metrics, step in kept.of("log_metrics")]
    steps = found["train/steps"]
    assert logged[-1] == (steps * 48, steps)  # the test
    assert all(seen == 48 * min(step + 1, steps) for seen, step in logged)
    assert SEEN not in rows("a")[0]
    pictures = {name: images for name, images, step in kept.of("log_pictures") if step == steps}
    assert set(pictures) == PANELS
    assert len(pictures["panels/largest_losses"]) == 24
    image, caption = pictures["panels/largest_losses"][0]
    assert "→" in caption and "loss" in caption and min(image.size) >= 96
    assert kept.of("log_checkpoint") == [(Path("runs/a", found["checkpoint"]), "a")]
    assert kept.of("end") == [("done", None, steps)]
    assert [name for name, _ in kept.calls[-2:]] == ["end", "finalize"]


@pytest.mark.parametrize(
    ("raised", "status"), [(Crash("bug"), "failed"), (Preempted("a warning"), "preempted"), (KeyboardInterrupt(), "interrupted")]
)  # fmt: skip
def test_a_logger_is_told_how_a_run_ended(train, kept, monkeypatch, raised, status):
    from lockstep.callbacks import FiniteLoss

    def stop(*_):
        raise raised

    monkeypatch.setattr(FiniteLoss, "on_train_batch_end", stop)
    with pytest.raises((type(raised), SystemExit)):
        train("run=a", "logger=tensorboard")
    assert report("a")["status"] == status
    ((told, error, _),) = kept.of("end")
    assert (told, str(raised) in str(error)) == (status, True)
    assert not kept.of("log_checkpoint")


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
        cfg = identify(cfg, None, experiment)
    made = labels(cfg, cfg.logger.wandb)
    assert (made.get("group"), made.get("tags")) == (group, tags)
    assert not labels(cfg, cfg.logger.csv)


def test_keys_are_flat_and_values_plain():
    config = {"a": {"b": 1, "c": {"d": None}}, "e": [1, 2], "f": True, 3: "x", "empty": {}}
    assert flat(config) == {"a.b": 1, "a.c.d": "None", "e": "[1, 2]", "f": True, "3": "x"}


# --- images of panels ------------------------------------------------------------------------------------------------


def test_panels_are_drawn():
    matrix = Matrix("Confusion matrix", ["cat", "dog"], [[5, 0], [3, 2]], "Rows are targets.")
    lines = Lines("Calibration", "x", "y", {"measured": [(0.0, 0.1), (1.0, 0.8)], "none": []})
    points = Points("Scatter", "x", "y", [(0.0, 1.0), (2.0, 3.0)], diagonal=True)
    bars = Bars("Histogram", "x", "y", [0.0, 1.0, 2.0], [3, 4])
    for panel in (matrix, lines, points, bars, Points("Nothing", "x", "y", [])):
        ((image, caption),) = panels.images_of_panel(panel)
        assert caption.startswith(panel.title)
        assert np.asarray(image).std() > 5  # something is drawn
    assert panels.images_of_panel(Table("Figures", ("a",), [(1,)])) == []


def test_samples_are_drawn_with_their_captions():
    image = np.arange(3 * 20 * 30, dtype=np.uint8).reshape(3, 20, 30)
    mask = Mask(np.ones((20, 30), int))
    samples = [
        Sample(7, {"target": "cat", "prediction": "dog", "loss": 2.5}, image),
        Sample(8, {"prediction": mask, "target": mask}, image),
        Sample(9, {"target": "a text"}),
    ]
    found = panels.images_of_panel(Gallery("Largest losses", samples))
    assert [caption.splitlines()[0] for _, caption in found] == ["cat → dog", "#8", "#8"]
    small = np.asarray(found[0][0])
    assert (small[::4, ::4] == image.transpose(1, 2, 0)).all()  # enlarged, not changed
    page = panels.sheet(found)
    assert page.width > 3 * 120 and page.height > 80
    assert (np.asarray(page)[:80, :120] == small).all()
    assert panels.sheet(found[:1]) is found[0][0]


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
    assert set(tags["images"]) >= PANELS
    matrix = Image.open(io.BytesIO(events.Images("panels/confusion_matrix")[-1].encoded_image_string))
    assert matrix.size == (500, 500)
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
    media: dict[str, dict[str, Any]] = {}
    for name, value in [pair for row in history for pair in row.items() if pair[0].startswith("panels/")]:
        media.setdefault(name.partition(".")[0], {})[name.partition(".")[2]] = value
    assert set(media) == PANELS
    worst = media["panels/largest_losses"]
    assert (worst["count"], "→" in worst["captions"][0]) == (24, True)
    folder = next(Path("runs/sweep/3/wandb").glob("offline-run-*/files/media/images/panels/largest_losses*")).parent
    assert len(list(folder.glob("largest_losses*.png"))) == 24
    (artifact,) = [record.artifact for record in of(second, "request") if record.HasField("log_artifact")] or of(
        second, "artifact"
    )
    assert (artifact.name, artifact.type) == (f"model-{begun.run_id}", "model")
    summary = {k: v for record in of(second, "summary") for k, v in values(record.update).items()}
    assert summary["status"] == "done"
    assert [record.exit_code for record in of(second, "exit")] == [0]


@pytest.mark.parametrize(
    ("raised", "code", "marked"), [(Crash("my bug"), 1, False), (Preempted("a warning"), 1, True), (KeyboardInterrupt(), 255, False)]
)  # fmt: skip
def test_wandb_is_told_how_a_run_ended(train, client, monkeypatch, raised, code, marked):
    from lockstep.callbacks import FiniteLoss

    def stop(*_):
        raise raised

    monkeypatch.setattr(FiniteLoss, "on_train_batch_end", stop)
    with pytest.raises((type(raised), SystemExit)):
        train("run=a", "logger=wandb")
    (run,) = runs_of_wandb("a")
    assert [record.exit_code for record in of(run, "exit")] == [code]
    assert bool(of(run, "preempting")) is marked
    summary = {k: v for record in of(run, "summary") for k, v in values(record.update).items()}
    assert (summary["status"], summary["error"]) == (report("a")["status"], report("a")["error"])


def test_a_run_that_wandb_refuses_leaves_nothing(train, client, monkeypatch):
    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("API key must have 40+ characters")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match="W&B cannot start: API key must"):
        train("run=a", "logger=wandb")
    assert not Path("runs/a").exists()
