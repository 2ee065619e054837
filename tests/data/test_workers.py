"""Processes that load data: one that is killed is named; without shared memory their batches come through pipes."""

import errno
import logging
import multiprocessing
import os
import signal

import pytest
import torch
from in_process import report
from omegaconf import OmegaConf
from torch.utils.data import get_worker_info

from lockstep import build
from lockstep.data import loaders
from lockstep.data.datamodule import DataModule
from lockstep.data.loaders import FromWorkers, Indexed
from lockstep.errors import LostProcess, TrainingFailed


def test_a_dead_worker_ends_the_run_and_is_named(train, monkeypatch):
    fetched = Indexed.__getitem__

    def die(self, indices_B):
        if get_worker_info().id == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return fetched(self, indices_B)

    monkeypatch.setattr(Indexed, "__getitem__", die)
    # torch may see that it ended before it sees how
    words = r"a process that loads data \(pid \d+\) (was ended by SIGKILL, which usually means that memory ran out|ended)\. Try fewer"
    with pytest.raises(LostProcess, match=words):
        train("run=a", "data.num_workers=2")
    assert report("a")["status"] == "failed"


def test_the_workers_of_training_end_before_the_test(train, monkeypatch):
    before, left, made = set(multiprocessing.active_children()), [], DataModule.test_dataloader

    def looked(self):
        left.append(set(multiprocessing.active_children()) - before)
        return made(self)

    monkeypatch.setattr(DataModule, "test_dataloader", looked)
    train("run=a", "data.num_workers=1")
    assert left == [set()]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that", "(pid 7) was ended by SIGBUS: there was no room in /dev/shm"),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", "(pid 7, 8) ended. Try"),
        ("DataLoader worker (pid 7) exited unexpectedly with exit code 3. Details are lost", "(pid 7) ended with exit code 3. Try"),
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "(pid 7) was ended by SIGKILL, which usually"),
        ("Caught ValueError in DataLoader worker process 0.", None),
    ],
)  # fmt: skip
def test_words_of_torch_are_understood(message, words):
    found = loaders.lost(RuntimeError(message))
    assert found is None if words is None else words in found


def test_batches_come_through_pipes_where_shared_memory_is_full(monkeypatch, caplog):
    def full(_):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2>: No space left on device (28)")

    class Named:
        def __getitem__(self, indices_B):
            boxes = [{"boxes": torch.full((i, 4), float(i))} for i in indices_B]
            return {"input": torch.arange(10.0)[indices_B], "name": [f"file {i}" for i in indices_B], "target": boxes}

    def batches(count: int):
        indices = [torch.tensor([1, 2]).numpy(), torch.tensor([3, -1]).numpy()]
        return list(FromWorkers(Named(), indices, num_workers=count).batches())

    wanted = batches(0)
    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with caplog.at_level(logging.WARNING):
        found = batches(2)
    assert len(caplog.records) == 1
    assert "/dev/shm has no room" in caplog.text
    for one, other in zip(wanted, found, strict=True):
        assert (one["name"], one["count"]) == (other["name"], other["count"])
        assert all(torch.equal(one[name], other[name]) for name in ("input", "index"))
        assert all(torch.equal(a["boxes"], b["boxes"]) for a, b in zip(one["target"], other["target"], strict=True))


def test_workers_that_cannot_be_started_say_why(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(torch.utils.data.DataLoader, "__iter__", full)
    with pytest.raises(TrainingFailed, match=r"2 processes that load data .* Too many open files.* data.num_workers=0"):
        list(FromWorkers({}, [], num_workers=2).batches())


@pytest.mark.parametrize(("free", "warns"), [(2**16, True), (2**30, False)])
def test_the_room_of_a_small_shared_memory_is_left_to_others_and_told_to_own_dataloaders(
    free, warns, monkeypatch, caplog
):
    monkeypatch.setattr(loaders, "shared_room", lambda: free)
    monkeypatch.setattr(logging.getLogger("lockstep"), "propagate", True)
    monkeypatch.setattr(build, "has_own_loaders", lambda _: True)
    monkeypatch.setattr(build, "create", lambda *_: None)
    build.data(OmegaConf.create({"data": {}}))
    assert ("64 KiB free" in caplog.text and "num_workers=0" in caplog.text) is warns
    assert Indexed({}).shares is not warns
