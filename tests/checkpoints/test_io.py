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
from lockstep.checkpoints import io as checkpoint_io
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


def test_a_snapshot_keeps_tied_weights_one_tensor():
    tied = torch.nn.Linear(3, 3, bias=False)
    both = torch.nn.Sequential(tied, torch.nn.ReLU(), torch.nn.Linear(3, 3, bias=False))
    both[2].weight = tied.weight
    empty = {"a": torch.zeros(0), "b": torch.zeros(0, 2)}
    content, memory = checkpoint_io.snapshot({"net": both.state_dict(), **empty}, {}, in_use=False)
    again, _ = checkpoint_io.snapshot({"net": both.state_dict(), **empty}, memory, in_use=False)
    for found in (content, again):
        assert found["net"]["0.weight"].data_ptr() == found["net"]["2.weight"].data_ptr() != tied.weight.data_ptr()
        assert torch.equal(found["net"]["0.weight"], tied.weight)
        assert found["b"].shape == (0, 2)


@pytest.mark.parametrize("in_use", [False, True])
def test_what_was_one_tensor_and_is_two_has_two_values(in_use):
    """As the scores of ModelCheckpoint, which are one tensor after a new best."""
    score = torch.tensor(1.0)
    _, memory = checkpoint_io.snapshot({"best": score, "current": score}, {}, in_use=False)
    content, _ = checkpoint_io.snapshot({"best": score, "current": torch.tensor(2.0)}, memory, in_use=in_use)
    assert {name: float(value) for name, value in content.items()} == {"best": 1.0, "current": 2.0}
    content, _ = checkpoint_io.snapshot({"best": torch.tensor(3.0), "current": score}, memory, in_use=in_use)
    assert {name: float(value) for name, value in content.items()} == {"best": 3.0, "current": 1.0}


def test_what_lies_where_it_lay_and_was_not_changed_is_not_copied_again():
    """How the best and the last checkpoint of a step share a copy of what is on a GPU, without fetching it twice."""
    weights = torch.ones(3)
    then = checkpoint_io.origin(weights)
    assert checkpoint_io.origin(torch.nn.Parameter(weights).detach()) == then
    assert checkpoint_io.origin(weights[1:]) != then
    with torch.no_grad():
        weights.add_(1)
    assert checkpoint_io.origin(weights) != then
    others = [checkpoint_io.origin(torch.full((3,), float(i))) for i in range(3)]  # each is freed before the next
    assert all(a != b for i, a in enumerate(others) for b in others[:i])


def test_copies_from_a_gpu_are_pinned_and_the_writer_waits_for_them(tmp_path, monkeypatch):
    """Training only begins them: one event after all of them, however many tensors there are."""
    done, begun = [], []

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self) -> None:
            done.append("recorded")

        def synchronize(self) -> None:
            assert threading.current_thread() is not threading.main_thread()
            done.append("copied")

    copy, write, empty = torch.Tensor.copy_, sharded.write, torch.empty_like
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    monkeypatch.setattr(
        torch, "empty_like", lambda t, *, device, pin_memory: empty(t, device=device) if pin_memory else 0
    )
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *a, **k: (begun.append(k["non_blocking"]), copy(*a, **k))[1])
    monkeypatch.setattr(sharded, "write", lambda what, path: (done.append("written"), write(what, path)))
    io, weights = AtomicCheckpointIO(background=True), {"a": torch.ones(3), "b": torch.zeros(3)}
    for name in ("best", "last"):
        io.save_checkpoint({"global_step": 1, "state_dict": weights}, tmp_path / f"{name}.ckpt")
    assert begun == [True, True]
    io.drain()
    weights["a"].fill_(7)
    assert [what for what in done if what != "recorded"] == ["copied", "written"] * 2
    monkeypatch.undo()
    assert torch.equal(io.load_checkpoint(tmp_path / "last.ckpt")["state_dict"]["a"], torch.ones(3))


def test_an_older_checkpoint_goes_when_the_newer_one_is_there(tmp_path, monkeypatch):
    old, new, last = (tmp_path / name for name in ("best-step-1.ckpt", "best-step-2.ckpt", "last.ckpt"))
    io = AtomicCheckpointIO(background=True)
    io.save_checkpoint(content(1, 1.0), old)
    io.drain()
    gate = Gate(monkeypatch)
    io.save_checkpoint(content(2, 2.0), new)
    io.remove_checkpoint(old)
    io.save_checkpoint(content(2, 2.0), last)  # does not wait either
    assert gate.begun.wait(LONG_S)
    assert (value_of(old), new.exists(), last.exists(), gate.done) == (1.0, False, False, [])
    gate.open.set()
    io.drain()
    assert gate.done == [("take_place", new.name), ("remove", old.name), ("take_place", last.name)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, last.name]


def test_what_is_written_is_what_was_there_at_the_call(tmp_path, gate):
    io, checkpoint = AtomicCheckpointIO(background=True), content(1, 1.0)
    io.save_checkpoint(checkpoint, tmp_path / "best.ckpt")
    checkpoint["best"]["a"].append(5.0)
    checkpoint["state_dict"]["w"][:] = 2.0
    with torch.inference_mode():  # as the best ones are, within a validation
        io.save_checkpoint(checkpoint, tmp_path / "last.ckpt")  # of the same step, though something has changed
    checkpoint["state_dict"]["w"][:] = 3.0
    gate.open.set()
    assert io.load_checkpoint(tmp_path / "best.ckpt")["best"] == {"a": [1.0]}
    assert [value_of(tmp_path / f"{name}.ckpt") for name in ("best", "last")] == [1.0, 2.0]
    io.save_checkpoint(checkpoint | {"global_step": 2}, tmp_path / "last.ckpt")  # into the memory of the one before
    io.drain()
    assert [value_of(tmp_path / f"{name}.ckpt") for name in ("best", "last")] == [1.0, 3.0]


def test_checkpoints_of_one_step_share_their_memory_and_the_next_step_takes_it_when_they_are_written(
    tmp_path, monkeypatch
):
    snapshots, second, order = [], threading.Event(), []
    original, write = checkpoint_io.snapshot, sharded.write

    def snapshot(*args, **kwargs):
        copied = original(*args, **kwargs)
        snapshots.append(copied[0]["state_dict"]["w"].data_ptr())
        order.append("snapshot")
        if len(snapshots) == 3:
            second.set()
        return copied

    def slow_write(what, path):
        if order.count("written") == 0:
            second.wait(0.5)  # time enough to come too early
        write(what, path)
        order.append("written")

    monkeypatch.setattr(checkpoint_io, "snapshot", snapshot)
    monkeypatch.setattr(sharded, "write", slow_write)
    io = AtomicCheckpointIO(background=True)
    for step, name in ((1, "best"), (1, "last"), (2, "last")):
        io.save_checkpoint(content(step, float(step)), tmp_path / f"{name}.ckpt")
    io.drain()
    assert order == ["snapshot", "snapshot", "written", "written", "snapshot", "written"]
    assert len(set(snapshots)) == 1
    assert [value_of(tmp_path / f"{name}.ckpt") for name in ("best", "last")] == [1.0, 2.0]


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
def test_a_kill_in_the_background_leaves_what_was_there_and_a_normal_end_loses_nothing(
    work, code, left, tmp_path, fork_server
):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    assert forked.call(__file__, work.__name__, str(folder)).wait(LONG_S) == code
    found = list(finding.checkpoints(tmp_path / "run"))
    assert [path.name for path in found] == left
    assert {value_of(path) for path in found} == {1.0}
