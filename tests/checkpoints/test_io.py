"""Checkpoints that are written beside the training: in order, as they were, and safe from a kill and a full disk."""

import os
import resource
import signal
import threading
from pathlib import Path

import forked
import pytest
import torch

from lockstep.checkpoints import finding, sharded
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.errors import NotSaved
from lockstep.machine import files

LONG_S = 60.0  # a test that waits so long has failed
WEIGHTS = 100_000


def content(step: int, value: float) -> dict:
    return {"global_step": step, "state_dict": {"w": torch.full((WEIGHTS,), value)}, "best": {"a": [value]}}


def value_of(path: Path) -> float:
    """The one value that the weights of a checkpoint have."""
    (value,) = sharded.open_file(path)["state_dict"]["w"].unique()
    return float(value)


class Gate:
    """Holds the writer up until it is opened, and keeps account of what is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.open, self.done = threading.Event(), threading.Event(), []
        for module, name in ((sharded, "write"), (files, "take_place"), (files, "remove")):
            monkeypatch.setattr(module, name, self.noted(name, getattr(module, name)))

    def noted(self, name, original):
        def noted(*args):
            path = args[-1]
            if name == "write":
                self.begun.set()
                assert self.open.wait(LONG_S)
            original(*args)
            if path.suffix != ".part":
                self.done.append((name, path.name))

        return noted


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def test_tied_weights_stay_one_tensor_and_a_copy_is_made_in_the_memory_of_the_last_one(tmp_path):
    tied = torch.nn.Linear(300, 300, bias=False)
    net, io = torch.nn.Sequential(tied, tied), AtomicCheckpointIO(background=True)
    for step in (1, 2):
        torch.nn.init.constant_(tied.weight, float(step))
        io.save_checkpoint(
            {"global_step": step, "net": net.state_dict(), "empty": torch.zeros(0, 2)}, tmp_path / f"{step}"
        )
    copied = [io.load_checkpoint(tmp_path / f"{step}") for step in (1, 2)]
    assert [float(each["net"]["0.weight"].unique()) for each in copied] == [1.0, 2.0]
    assert copied[0]["net"]["0.weight"].data_ptr() == copied[0]["net"]["1.weight"].data_ptr()
    assert copied[1]["empty"].shape == (0, 2)
    memory = {io.stager.stage(net.state_dict())["0.weight"].data_ptr() for _ in range(2)}
    assert len(memory) == 1


def test_an_older_checkpoint_goes_when_the_newer_one_is_there(tmp_path, monkeypatch):
    old, new, last = (tmp_path / name for name in ("best-step-1.ckpt", "best-step-2.ckpt", "last.ckpt"))
    io = AtomicCheckpointIO(background=True)
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
    assert gate.done == [("take_place", new.name), ("remove", old.name), ("take_place", last.name)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, last.name]


def test_what_is_written_is_what_was_there_at_the_call(tmp_path, gate):
    io, checkpoint = AtomicCheckpointIO(background=True), content(1, 1.0)
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
    io = AtomicCheckpointIO(background=background)
    old, new = tmp_path / "best-step-1.ckpt", tmp_path / "best-step-2.ckpt"
    small = {"global_step": 1, "state_dict": {"w": torch.ones(10)}}
    io.save_checkpoint(small, old)

    def save_two() -> None:
        io.save_checkpoint(content(2, 2.0), new)
        io.remove_checkpoint(old)
        io.save_checkpoint(content(3, 3.0), tmp_path / "last.ckpt")

    with pytest.raises(NotSaved, match=r"best-step-2.ckpt could not be saved: File too large\. .* resume=auto"):
        save_two()
    assert [path.name for path in tmp_path.iterdir()] == [old.name]
    assert value_of(old) == 1.0
    full_disk()  # has room again
    save_two()
    io.drain()
    assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, "last.ckpt"]


def test_an_error_is_told_at_the_end_and_hides_no_other(tmp_path, full_disk, caplog):
    io = AtomicCheckpointIO(background=True)
    io.save_checkpoint(content(1, 1.0), tmp_path / "last.ckpt")
    with pytest.raises(NotSaved):
        io.teardown()
    io.save_checkpoint(content(2, 2.0), tmp_path / "last.ckpt")
    with pytest.raises(KeyError):
        try:
            raise KeyError
        finally:
            io.teardown()
    assert "could not be saved" in caplog.text


def save_and_be_killed(place: str) -> None:
    folder, io = Path(place), AtomicCheckpointIO(background=True)
    io.save_checkpoint(content(1, 1.0), folder / "best-step-1.ckpt")
    io.save_checkpoint(content(1, 1.0), folder / "last.ckpt")
    io.drain()

    def half(what, path):
        path.write_bytes((folder / "last.ckpt").read_bytes()[: 2 * WEIGHTS])
        os.kill(os.getpid(), signal.SIGKILL)

    sharded.write = half
    io.save_checkpoint(content(2, 2.0), folder / "best-step-2.ckpt")
    io.remove_checkpoint(folder / "best-step-1.ckpt")
    io.save_checkpoint(content(2, 2.0), folder / "last.ckpt")
    io.drain()


def save_and_end(place: str) -> None:
    AtomicCheckpointIO(background=True).save_checkpoint(content(1, 1.0), Path(place) / "last.ckpt")


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
