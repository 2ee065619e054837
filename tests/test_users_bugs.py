"""A bug of the user's is shown as it is, exit code 1; a refusal of Lockstep's or Lightning's is one line, exit code 2."""

import json
import re
from pathlib import Path

import pytest
import thin_project

# Each class has a bug where a file in the working directory says so.
BUGGY = """from pathlib import Path

import lightning.pytorch as pl
from torch.utils.data import Dataset

from lockstep.data import Mnist
from lockstep.models import BasicNet


def bug(place):
    if Path("bug").read_text() == place:
        raise ValueError(f"my bug in {place}")  # an error that Lightning raises as well


class Net(BasicNet):
    def __init__(self, **given):
        bug("the constructor")
        super().__init__(**given)

    def forward(self, image):
        bug("forward")
        return super().forward(image)


class Watch(pl.Callback):
    def on_train_batch_end(self, *_):
        bug("a step")


class Items(Dataset):
    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        return len(self.arrays)

    def __getitem__(self, place):
        bug("a worker")


class Digits(Mnist):
    def __init__(self, **given):
        bug("the data's constructor")
        super().__init__(**given)

    @property
    def train(self):
        return Items(super().train) if Path("bug").read_text() == "a worker" else super().train

    def preprocess(self, batch):
        bug("the data")
        return super().preprocess(batch)
"""
OWN = {
    "src/buggy/__init__.py": BUGGY,
    "configs/model/buggy.yaml": "_target_: buggy.Net\n",
    "configs/data/buggy.yaml": "defaults: [mnist]\n_target_: buggy.Digits\n",
    "configs/callbacks/buggy.yaml": "watch:\n  _target_: buggy.Watch\n",
}
OPTIONS = ["model=buggy", "data=buggy", "callbacks=[default,buggy]", "trainer.max_steps=2", "trainer.limit_test_batches=1", "run=a"]  # fmt: skip
TWO = ["strategy=ddp", "trainer.devices=2"]
CASES = {  # the place of the bug, and more options
    "dry run": ["forward"],
    "training in two processes": ["a step", *TWO],
    "a process that loads data": ["a worker", "data.num_workers=1"],
    "data": ["the data"],
}


@pytest.fixture
def train(tmp_path, forked_command):
    """Types `python train.py` in a project whose code has a bug in `place`."""
    script = str(thin_project.write(tmp_path / "project", **OWN) / "train.py")

    def typed(place: str, *more: str):
        (forked_command.folder / "bug").write_text(place)
        return forked_command(script, *OPTIONS, *more)

    typed.folder = forked_command.folder
    return typed


SHOWN = 'raise ValueError(f"my bug in {place}")'  # where it is


def assert_shown(done, place: str) -> None:
    assert done.code == 1, done
    assert "error:" not in [line[:6] for line in done.err.splitlines()], done
    lines = [re.sub(r"^\[rank \d+\] ", "", line) for line in done.err.splitlines()]
    assert lines[0] == "Traceback (most recent call last):", done
    assert f"ValueError: my bug in {place}" in lines, done
    assert SHOWN in done.err


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.slow] * (name == "data")) for name in CASES])
def test_a_bug_shows_its_traceback_and_stays_in_the_runs_log(train, case):
    place, *more = CASES[case]
    assert_shown(train(place, *more), place)
    report = json.loads((train.folder / "runs/a/report.json").read_text())
    assert (report["status"], report["error"].partition(":")[0]) == ("failed", "ValueError")
    log = (train.folder / "runs/a/train.log").read_text()
    assert "Traceback (most recent call last):" in log
    assert SHOWN in log


def test_the_same_command_typed_again_after_a_bug_in_a_constructor_trains(train):
    for place in ("the data's constructor", "the constructor"):
        assert_shown(train(place), place)
        assert json.loads((train.folder / "runs/a/report.json").read_text())["status"] == "failed"
    done = train("nothing")
    assert done.code == 0, done
    assert json.loads((train.folder / "runs/a/report.json").read_text())["status"] == "done"
    assert "my bug" in (train.folder / "runs/a/train.log").read_text()  # and what was before is not lost


def test_a_limit_that_the_run_does_not_reach_is_one_line_and_leaves_nothing(train):
    done = train("nothing", "trainer.val_check_interval=1000", *TWO)
    assert done.code == 2, done
    (line,) = done.err.splitlines()
    assert line.startswith(
        "error: `val_check_interval` (1000) must be less than or equal to the number of the training batches (9)"
    )
    assert not Path(train.folder, "runs/a").exists()
