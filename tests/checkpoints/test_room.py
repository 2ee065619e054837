"""Disk space for checkpoints: too little is refused before the first step, and named when it runs out later."""

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from in_process import report

from lockstep.checkpoints import io, sharded
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.errors import NotSaved, UserError

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def free(monkeypatch):
    """Sets the free bytes of every disk."""
    return lambda count: monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(count, 0, count))


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True), 1),
        (torch.optim.LBFGS, 0),  # its step takes a closure: unknown
    ],
)
def test_what_an_optimizer_will_hold_is_known_before_its_first_step(make, values):
    net = torch.nn.Linear(100, 100)
    net.bias.requires_grad_(False)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = make(net.parameters())
    assert io.state_bytes(optimizer) == pytest.approx(values * 4 * 100 * 100, rel=1e-3)
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_disk_too_small_is_refused_before_the_first_step(train, run_a, free, monkeypatch):
    size = Path("runs/a/checkpoints/last.ckpt").stat().st_size  # AdamW: weights and two moments
    free(3 * size - size // 5)
    with pytest.raises(
        UserError,
        match=r"has 5 MiB for checkpoints, and 3 of 2 MiB need 5 MiB: .* 3\d\d KiB are missing\. .* runs_dir=<a folder",
    ):
        train("run=b")
    assert not Path("runs/b").exists()
    free(3 * size)
    assert train("run=b", "trainer.max_steps=1")["status"] == "done"
    # A resumed run replaces its own files; without momentum, SGD has nothing besides the weights.
    free(2 * size)
    assert train("run=a", "resume=auto", "trainer.max_epochs=2", "trainer.limit_train_batches=1")["status"] == "done"
    assert (
        train("run=c", "optim=sgd", "optim.momentum=0", "optim.nesterov=false", "trainer.max_steps=1")["status"]
        == "done"
    )
    free(size // 4)
    with pytest.raises(UserError, match="for checkpoints"):
        train("run=c", "resume=auto", "trainer.max_steps=2", "checkpoint.save_top_k=9")
    assert report("c")["status"] == "done"
    assert train("run=d", "trainer.enable_checkpointing=false", "trainer.max_steps=1")["status"] == "done"


def test_what_is_missing_is_said_when_the_disk_is_full(tmp_path, free, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    io = AtomicCheckpointIO(background=False)
    io.save_checkpoint({"w": torch.zeros(2**18)}, tmp_path / "last.ckpt")
    free(2**18)
    monkeypatch.setattr(sharded, "write", full)
    with pytest.raises(NotSaved, match=r"No space left .*needs 1 MiB, and 256 KiB are free: 768 KiB are missing\. The"):
        io.save_checkpoint({"w": torch.ones(2**18)}, tmp_path / "last.ckpt")
    assert not sharded.open_file(tmp_path / "last.ckpt")["w"].any()
