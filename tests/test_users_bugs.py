"""A bug of the user's is shown as it is, and ends with exit code 1."""

import json
import re

import pytest
import thin_project

OPTIONS = [
    "model=basic_net", "model._target_=buggy.Net", "data._target_=buggy.Digits", "+callbacks.watch._target_=buggy.Watch",
    "trainer.max_steps=2", "trainer.limit_test_batches=1", "run=a",
]  # fmt: skip


@pytest.fixture
def train(tmp_path, forked_command):
    """Types `python train.py` in a project whose code has a bug in `place`."""
    script = str(thin_project.write(tmp_path / "project", **thin_project.package("buggy")) / "train.py")

    def typed(place: str, *more: str):
        (forked_command.folder / "bug").write_text(place)
        return forked_command(script, *OPTIONS, *more)

    typed.run = forked_command.folder / "runs/a"
    return typed


def status(train) -> str:
    return json.loads((train.run / "report.json").read_text())["status"]


def assert_shown(train, place: str, *more: str) -> None:
    """Where the bug is, on the screen."""
    done, where = train(place, *more), 'raise ValueError(f"my bug in {place}")'
    assert done.code == 1, done
    lines = [re.sub(r"^\[rank \d+\] ", "", line) for line in done.err.splitlines()]
    assert not [line for line in lines if line.startswith("error:")], done
    assert lines[0] == "Traceback (most recent call last):", done
    assert f"ValueError: my bug in {place}" in lines, done
    assert where in done.err
    assert (train.run / "report.json").exists() == (place == "a step")  # the first is done


@pytest.mark.parametrize(("place", "more"), [
    ("forward", []),  # in the sanity validation
    pytest.param("a step", ["strategy=ddp", "trainer.devices=2"], marks=pytest.mark.slow),
    pytest.param("a worker", ["loader.num_workers=1"], marks=pytest.mark.slow),  # a process that loads data
    pytest.param("the data", [], marks=pytest.mark.slow),
])  # fmt: skip
def test_a_bug_shows_its_traceback_and_leaves_no_folder_before_the_first_step(train, place, more):
    assert_shown(train, place, *more)


@pytest.mark.slow
def test_the_same_command_typed_again_after_a_bug_in_a_constructor_trains(train):
    for place in ("the data's constructor", "the constructor"):
        assert_shown(train, place)
    done = train("nothing")
    assert (done.code, status(train)) == (0, "done"), done
