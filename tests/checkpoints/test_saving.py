"""Checkpoints are written while training continues: in order, as they were, and safe from a kill and a full disk. Those are kept that are
the best by the metric; of equal ones those of the lower loss, then the later ones; or the last."""

import math
import os
import resource
import signal
import threading
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import forked
import pytest
import torch
from in_process import rows
from torch.distributed.checkpoint.staging import DefaultStager
from torch.torch_version import TorchVersion

from lockstep import ROOT
from lockstep.checkpoints import finding, saving, weights
from lockstep.checkpoints.saving import AtomicCheckpointIO, ModelCheckpoint
from lockstep.errors import SaveFailed, UserError
from lockstep.machine import files

LONG_S = 60.0  # a test that waits so long has failed
WEIGHTS = 100_000


def content(step: int, value: float) -> dict:
    return {"global_step": step, "state_dict": {"w": torch.full((WEIGHTS,), value)}, "best": {"a": [value]}}


def value_of(path: Path) -> float:
    """The one value that the weights of a checkpoint have."""
    (value,) = weights.open_file(path)["state_dict"]["w"].unique()
    return float(value)


class Gate:
    """Holds the writer up until it is opened, and notes which files take their places and go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.open, self.done = threading.Event(), threading.Event(), []
        write, take_place, remove = weights.write, files.take_place, files.remove

        def held(content: dict, path: Path) -> None:
            self.begun.set()
            assert self.open.wait(LONG_S)
            write(content, path)

        def noted(*paths: Path) -> None:
            (take_place if len(paths) == 2 else remove)(*paths)
            if paths[-1].suffix != ".part":
                self.done.append(("there" if len(paths) == 2 else "gone", paths[-1].name))

        monkeypatch.setattr(weights, "write", held)
        monkeypatch.setattr(files, "take_place", noted)
        monkeypatch.setattr(files, "remove", noted)


def test_tied_weights_stay_one_tensor_and_a_copy_is_made_in_the_memory_of_the_last_one(tmp_path):
    tied = torch.nn.Linear(300, 300, bias=False)
    net, io = torch.nn.Sequential(tied, tied), AtomicCheckpointIO(tmp_path, background=True)
    for step in (1, 2):
        torch.nn.init.constant_(tied.weight, float(step))
        whole = {"global_step": step, "net": net.state_dict(), "empty": torch.zeros(0, 2)}
        io.save_checkpoint(whole, tmp_path / f"{step}")
    copied = [io.load_checkpoint(tmp_path / f"{step}") for step in (1, 2)]
    assert [float(each["net"]["0.weight"].unique()) for each in copied] == [1.0, 2.0]
    assert copied[0]["net"]["0.weight"].data_ptr() == copied[0]["net"]["1.weight"].data_ptr()
    assert copied[1]["empty"].shape == (0, 2)
    if torch.__version__ >= "2.13":
        memory = {io.stager.stage(net.state_dict())["0.weight"].data_ptr() for _ in range(2)}
        assert len(memory) == 1


def test_torch_before_2_13_makes_one_copy_with_a_stager(tmp_path, monkeypatch):
    """Remove this with the branch in saving.py when torch>=2.13 is required."""
    assert '"torch>=2.11,' in (ROOT / "pyproject.toml").read_text()
    stage, io = DefaultStager.stage, AtomicCheckpointIO(tmp_path, background=True)

    def stage_and_close(self: DefaultStager, values: dict) -> object:
        copy = stage(self, values)
        self.close()
        return copy

    monkeypatch.setattr(DefaultStager, "stage", stage_and_close)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1+cu130"))
    for step in (1, 2):
        io.save_checkpoint(content(step, float(step)), tmp_path / "last.ckpt")
    io.drain()
    assert value_of(tmp_path / "last.ckpt") == 2.0


def test_an_older_checkpoint_goes_when_the_newer_one_is_there(tmp_path, monkeypatch):
    old, new, last = (tmp_path / name for name in ("best-step-1.ckpt", "best-step-2.ckpt", "last.ckpt"))
    io = AtomicCheckpointIO(tmp_path, background=True)
    io.save_checkpoint(content(1, 1.0), old)
    io.drain()
    gate = Gate(monkeypatch)
    io.save_checkpoint(content(2, 2.0), new)
    io.remove_checkpoint(old)
    assert gate.begun.wait(LONG_S)
    assert (value_of(old), new.exists(), gate.done) == (1.0, False, [])
    gate.open.set()
    io.save_checkpoint(content(2, 2.0), last)
    io.drain()
    assert gate.done == [("there", new.name), ("gone", old.name), ("there", last.name)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, last.name]


def test_what_is_written_is_what_was_there_at_the_call(tmp_path, monkeypatch):
    io, checkpoint, gate = AtomicCheckpointIO(tmp_path, background=True), content(1, 1.0), Gate(monkeypatch)
    io.save_checkpoint(checkpoint, tmp_path / "best.ckpt")
    checkpoint["best"]["a"].append(5.0)
    checkpoint["state_dict"]["w"][:] = 2.0
    gate.open.set()
    with torch.inference_mode():  # as the best ones are, within a validation
        io.save_checkpoint(checkpoint, tmp_path / "last.ckpt")  # of the same step, though something has changed
    checkpoint["state_dict"]["w"][:] = 3.0
    assert io.load_checkpoint(tmp_path / "best.ckpt")["best"] == {"a": [1.0]}
    assert [value_of(tmp_path / f"{name}.ckpt") for name in ("best", "last")] == [1.0, 2.0]
    io.save_checkpoint(checkpoint | {"global_step": 2}, tmp_path / "last.ckpt")  # into the memory of the one before
    io.drain()
    assert [value_of(tmp_path / f"{name}.ckpt") for name in ("best", "last")] == [1.0, 3.0]


@pytest.fixture
def full_disk():
    """No file may become larger than a tenth of a checkpoint."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * WEIGHTS // 10, before[1]))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_is_told_and_leaves_the_older_checkpoint(background, tmp_path, full_disk):
    io = AtomicCheckpointIO(tmp_path, background=background)
    old, new = tmp_path / "best-step-1.ckpt", tmp_path / "best-step-2.ckpt"
    small = {"global_step": 1, "state_dict": {"w": torch.ones(10)}}
    io.save_checkpoint(small, old)

    def save_two() -> None:
        io.save_checkpoint(content(2, 2.0), new)
        io.remove_checkpoint(old)
        io.save_checkpoint(content(3, 3.0), tmp_path / "last.ckpt")

    with pytest.raises(SaveFailed, match=r"best-step-2.ckpt could not be saved: File too large\. .* resume=auto"):
        save_two()
    assert [path.name for path in tmp_path.iterdir()] == [old.name]
    assert value_of(old) == 1.0
    full_disk()  # has room again
    save_two()
    io.drain()
    assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, "last.ckpt"]


def test_an_error_is_told_at_the_end_and_hides_no_other(tmp_path, full_disk, caplog):
    io = AtomicCheckpointIO(tmp_path, background=True)
    io.save_checkpoint(content(1, 1.0), tmp_path / "last.ckpt")
    with pytest.raises(SaveFailed):
        io.teardown()
    io.save_checkpoint(content(2, 2.0), tmp_path / "last.ckpt")
    with pytest.raises(KeyError):
        try:
            raise KeyError
        finally:
            io.teardown()
    assert "could not be saved" in caplog.text


def save_and_be_killed(place: str) -> None:
    folder, io = Path(place), AtomicCheckpointIO(Path(place), background=True)
    io.save_checkpoint(content(1, 1.0), folder / "best-step-1.ckpt")
    io.save_checkpoint(content(1, 1.0), folder / "last.ckpt")
    io.drain()

    def half(what, path):
        path.write_bytes((folder / "last.ckpt").read_bytes()[: 2 * WEIGHTS])
        os.kill(os.getpid(), signal.SIGKILL)

    weights.write = half
    io.save_checkpoint(content(2, 2.0), folder / "best-step-2.ckpt")
    io.remove_checkpoint(folder / "best-step-1.ckpt")
    io.save_checkpoint(content(2, 2.0), folder / "last.ckpt")
    io.drain()


def save_and_end(place: str) -> None:
    AtomicCheckpointIO(Path(place), background=True).save_checkpoint(content(1, 1.0), Path(place) / "last.ckpt")


@pytest.mark.parametrize(
    ("work", "code", "left"),
    [(save_and_be_killed, -signal.SIGKILL, ["last.ckpt", "best-step-1.ckpt"]), (save_and_end, 0, ["last.ckpt"])],
)
def test_a_kill_in_the_background_leaves_what_was_there_and_a_normal_end_loses_nothing(work, code, left, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    assert forked.call(__file__, work.__name__, str(folder)).wait(LONG_S) == code
    found = list(finding.checkpoints(tmp_path / "run"))
    assert [path.name for path in found] == left
    assert {value_of(path) for path in found} == {1.0}


# --- Which are kept ---


@pytest.fixture
def trainer(monkeypatch):
    """A trainer with so many `steps` done."""
    trainer = Mock(loggers=[], is_global_zero=True, sanity_checking=False, steps=0, global_step=0)
    trainer.save_checkpoint = lambda path, **_: path.touch()
    trainer.strategy.reduce_boolean_decision = lambda decision, **_: decision
    trainer.strategy.remove_checkpoint = Path.unlink
    trainer.state.fn = "fit"
    monkeypatch.setattr(saving, "steps_done", lambda trainer: trainer.steps)
    return trainer


def made(folder, mode: str, top: int) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, monitor="val/acc", mode=mode, save_top_k=top)


def names(paths) -> list[int]:
    return sorted(int(Path(path).stem.rpartition("-")[2]) for path in paths)


@pytest.mark.parametrize(("mode", "top"), product(["min", "max"], [1, 2, 3, -1]))
def test_the_kept_checkpoints_are_the_first_of_a_sorted_list_also_across_resumes(trainer, tmp_path, mode, top):
    """The reference sorts all validations; each checkpoint here is by a new callback with the state of the one before."""
    scores = [0.5, 0.5, math.nan, 0.5, 1.0, 1.0, 0.5, 1.0, 0.25]
    losses = [0.3, 0.2, 0.1, 0.2, 0.7, 0.7, math.nan, 0.6, 0.5]
    sign, state, seen = (1 if mode == "max" else -1), None, []
    for step, (score, loss) in enumerate(zip(scores, losses, strict=True), start=1):
        callback = made(tmp_path, mode, top)
        if state:
            callback.load_state_dict(state)
        trainer.steps, trainer.global_step = step, 2 * step  # of two optimizers
        trainer.callback_metrics = {"val/acc": torch.tensor(score), "val/loss": torch.tensor(loss)}
        callback.on_validation_end(trainer, None)
        state = callback.state_dict()
        if math.isfinite(score) and math.isfinite(loss):  # others are never among the best
            seen.append((sign * score, -loss, step))
        expected = [each[2] for each in sorted(seen, reverse=True)][: None if top == -1 else top]
        assert names(tmp_path.iterdir()) == names(callback.best_k_models) == sorted(expected)
        assert names([callback.best_model_path]) == expected[:1]


@pytest.mark.parametrize("name", ["/x/..", "../..", ".", "/x/last.ckpt", "config.yaml", "../best-step-1.ckpt"])
def test_a_checkpoint_names_no_file_to_remove_but_a_best_checkpoint_of_this_run(name, tmp_path):
    (tmp_path / "best-step-2.ckpt").touch()
    (tmp_path / "last.ckpt").touch()
    callback = made(tmp_path, "max", 1)
    kept = {name: (1.0, 1.0), "best-step-3.ckpt": (1.0, 1.0), "best-step-2.ckpt": (0.5, 1.0)}
    callback.load_state_dict({"kept": kept})
    assert list(callback.best_k_models) == [callback.best_model_path] == [str(tmp_path / "best-step-2.ckpt")]


def test_only_the_end_of_an_epoch_may_complete_a_step_before_a_validation():
    begin = saving.Position(None, {}).on_train_start
    trainer = Mock(val_check_batch=10, num_training_batches=10, accumulate_grad_batches=4)
    begin(trainer, None)
    trainer.num_training_batches = 20
    with pytest.raises(UserError, match="after 10 micro-batches, within a step of 4"):
        begin(trainer, None)


@pytest.mark.parametrize("typed", ["task.monitor=null", "checkpoint.monitor=null trainer.limit_val_batches=0"])
def test_without_a_monitor_the_last_checkpoint_is_kept_and_tested(train, typed):
    report = train("run=a", "trainer.max_epochs=2", "optim.lr=0", *typed.split())
    assert (report["status"], report["monitor"], report["checkpoint"]) == ("done", None, "checkpoints/last.ckpt")
    assert [path.name for path in Path("runs/a/checkpoints").iterdir()] == ["last.ckpt"]
    assert ("val/acc" in report) == ("limit_val_batches=0" not in typed)
    assert report["test/count"] == 103
    assert "Test accuracy" in Path("runs/a/report.html").read_text()
    assert report["train/epochs"] == 2
    validated = [row["val/loss"] for row in rows("a") if row.get("val/loss")]
    assert not validated or report["val/loss"] == float(validated[-1])  # of the last step
