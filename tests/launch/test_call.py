"""`lockstep.train` from Python: the caller's process is afterwards what it was."""

import csv
import json
import logging
import os
import pickle
import random
import signal
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from in_process import options
from lightning.pytorch import LightningModule

import lockstep
from lockstep.errors import TrainingFailed, UserError
from lockstep.machine import process, system, world


@pytest.mark.parametrize(("owned", "accelerator", "is_sharded"), [
    (True, "cpu", False), (False, "cpu", False), (True, "cuda", False), (True, "cpu", True),
])  # fmt: skip
def test_memory_is_tuned_in_a_command_that_trains_on_the_cpu_without_shards(
    owned, accelerator, is_sharded, monkeypatch
):
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    libc = Mock()
    monkeypatch.setattr(process, "is_command", owned)
    monkeypatch.setattr(system.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(system.ctypes, "CDLL", lambda _: libc)
    world.keep_freed_memory(accelerator, is_sharded=is_sharded)
    assert libc.mallopt.called == (owned and accelerator == "cpu" and not is_sharded)


def state() -> dict[str, object]:
    names = (None, "lightning", "lightning.pytorch", "lightning.fabric", "lockstep")
    loggers = [logging.getLogger(name) for name in names]
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "environment": dict(os.environ),
        "argv": list(sys.argv),
        "import path": list(sys.path),
        "folder": Path.cwd(),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "warning filters": list(warnings.filters),
        "warnings to": warnings.showwarning,
        "loggers": [(x.level, x.propagate, list(x.handlers), list(x.filters)) for x in loggers],
        "log handlers": [(h.level, list(h.filters)) for x in loggers for h in x.handlers],
        "threads": torch.get_num_threads(),
        "tf32": (cuda.allow_tf32, cudnn.allow_tf32, cuda.fp32_precision, torch.get_float32_matmul_precision()),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark),
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "hooks": (sys.excepthook, sys.unraisablehook),
    }


@pytest.fixture
def as_a_caller_likes_it(tmp_path, monkeypatch):
    """Settings that are not the defaults, so that setting defaults would show."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "is_command", False)
    with process.libraries_restored():
        torch.set_num_threads(3)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("always", message="of the caller")
        logging.captureWarnings(True)
        yield


@pytest.mark.slow
def test_the_callers_process_is_left_as_it_was(as_a_caller_likes_it, mnist, cache, monkeypatch):
    common = [f"data.root={mnist}", f"data.cache_dir={cache}", "trainer.accelerator=cpu", "trainer.deterministic=true"]
    during: dict[str, object] = {}
    monkeypatch.setattr(LightningModule, "on_train_start", lambda _: during.update(state()))
    before = state()

    def changed(after: dict[str, object]) -> set[str]:
        return {name for name, value in after.items() if value != before[name]}

    report = lockstep.train(["run=a", "trainer.limit_train_batches=2", *common])
    assert (report["status"], report.folder, report) == ("done", Path("runs/a"), lockstep.load_report("a"))
    assert pickle.loads(pickle.dumps(report)).folder == report.folder  # a sweep's job may run in another process
    assert changed(state()) == set()
    set_up = "environment, signals, warning filters, loggers, log handlers, tf32, deterministic, random"
    assert changed(during) == set(set_up.split(", ")), "else that would show nothing"
    with pytest.raises(TrainingFailed):
        lockstep.train(["run=b", "optim=sgd", "optim.lr=1e30", "trainer.log_every_n_steps=1", *common])
    with pytest.raises(UserError):
        lockstep.train(["optim.lrr=1", *common])
    lockstep.evaluate(["run=a", f"data.cache_dir={cache}"])
    (row,) = lockstep.sweep(["run=s", "seed=3", "trainer.limit_train_batches=2", *common])
    assert (row["status"], row["overrides"].split()[0]) == ("done", "seed=3")
    assert changed(state()) == set()


@pytest.mark.slow
def test_a_sweep_returns_the_rows_of_its_table_those_of_failed_jobs_too(train, mnist, cache):
    common = [*options(mnist, cache), "trainer.limit_train_batches=2", "trainer.accumulate_grad_batches=2"]
    rows = lockstep.sweep([*common, "run=s", "loader.batch_size=48,47", "seed=0,1"])
    assert [row["run"] for row in rows] == ["s/0", "s/1", "s/2", "s/3"]
    assert [row["status"] for row in rows] == ["done", "done", "failed", "failed"]
    assert [row["seed"] for row in rows[:2]] == [0, 1]
    assert all("loader.batch_size=47" in row["overrides"] for row in rows[2:])
    assert rows[0] == json.loads(Path("runs/s/0/report.json").read_text()) | {"run": "s/0"}
    with Path("runs/s/results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["status"] for row in table] == [row["status"] for row in rows]
    assert [float(row["test/loss"]) for row in table[:2]] == [row["test/loss"] for row in rows[:2]]
    assert lockstep.train(["run=alone", "loader.batch_size=48", "seed=1", *common])["test/loss"] == rows[1]["test/loss"]


def test_mistakes_are_refused_before_a_sweep_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for wrong, told in (
        ("optim.lrr=1,2", "did you mean optim.lr"),
        ("-m", "-m: sweep accepts only key=value"),
        ("hydra.mode=RUN", "hydra.mode cannot be set"),
        ("hydra.sweep.dir=/tmp/there", r"hydra.sweep.dir cannot be set(.|\n)*run=<name> and runs_dir=<folder>"),
    ):
        with pytest.raises(UserError, match=told):
            lockstep.sweep(["seed=0,1", wrong])
    assert list(tmp_path.iterdir()) == []
