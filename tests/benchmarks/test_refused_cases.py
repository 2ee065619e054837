"""What benchmarks/refused.py tries: a quick selection as the check sees it, and all of it when there is time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import refused
from refused import DIM, LATE, LEFT, SILENT, TRACEBACK, WELL, WORKS, WRONGLY, Outcome, verdict
from refused_cases import Case, cases, digits

from lockstep import ROOT
from lockstep.config.checks import check
from lockstep.config.compose import CONFIG_ERRORS, compose_config, explain, fixed_keys
from lockstep.data import Mnist
from lockstep.errors import UserError

EVERY = 150  # of the cases that the config check alone refuses


def test_there_are_many_cases_and_each_is_of_a_family():
    assert len(cases()) > 1000
    assert len({case.family for case in cases()}) > 10


def told(args: tuple[str, ...]) -> list[str]:
    try:
        return [*fixed_keys(args), *check(compose_config("train", ["trainer.accelerator=cpu", *args]))]
    except CONFIG_ERRORS as e:
        return explain(e, "train", list(args))


def test_some_of_the_cases_are_refused_by_the_config_check():
    kinds = ("a wrong value", "a key is null", "a group is removed", "a name is misspelt")
    chosen = [case for case in cases() if case.family.startswith(kinds) and not case.works]
    for case in chosen[::EVERY]:
        assert any(case.key in text for text in told(case.args)), case.name


def test_damaged_images_of_the_cases_are_refused(tmp_path):
    (tmp_path / "own").mkdir()
    chosen = [case for case in cases() if case.family == "data files" and "own/train-images-idx3-ubyte" in case.files]
    assert len(chosen) > 10
    for case in chosen:
        for name, content in (digits() | case.files).items():
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=case.key):
            parts = Mnist.read_files(Mnist.find(tmp_path / "own") or [])
            raise AssertionError({name: array.shape for name, array in parts.items()})


@pytest.mark.parametrize(("code", "message", "stage", "left", "expected"), [
    (2, "error: optim.lr=x is not possible", "config", [], WELL), (2, "error: something", "config", [], DIM),
    (2, "error: optim.lr=x", "run", [], LATE), (2, "error: optim.lr=x", "config", ["runs"], LEFT),
    (1, "Traceback (most recent call last)", "config", [], TRACEBACK), (0, "", "run", [], SILENT), (None, "", "run", [], SILENT),
])  # fmt: skip
def test_how_a_case_was_refused(code, message, stage, left, expected):
    assert verdict(Case("a", ("optim.lr=x",), "optim.lr"), code, message, stage, left) == expected
    works = verdict(Case("a", ("optim.lr=x",), "optim.lr", works=True), code, message, stage, left)
    assert works == (WORKS if code == 0 else WRONGLY)


def test_the_page_counts_by_family():
    now = [Outcome("a", "x=1", WELL, 1.0, "config", 2, ""), Outcome("b", "y=1", DIM, 2.0, "config", 2, "")]
    page = refused.page(now)
    assert "| a | 1 | 1 |" in page
    assert "- unclear: `y=1`" in page
    assert "| all | 2 | 1 |" in page


@pytest.mark.full
def test_all_cases_are_refused_well(tmp_path):
    command = [sys.executable, str(Path(ROOT, "benchmarks/refused.py")), "--save", str(tmp_path / "outcomes.json")]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False, stdout=subprocess.DEVNULL)
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert sum(outcome["verdict"] in (WELL, WORKS) for outcome in outcomes) > 0.97 * len(outcomes)
