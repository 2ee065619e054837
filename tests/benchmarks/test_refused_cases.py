"""What benchmarks/refused.py tries: a quick selection as the check sees it, and all of it when there is time."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import refused
from refused import DIM, LATE, LEFT, SILENT, TRACEBACK, WELL, WORKS, WRONGLY, Case, Outcome, cases, verdict

from lockstep import ROOT
from lockstep.config.checks import resolve
from lockstep.config.compose import fixed_keys
from lockstep.errors import UserError

EVERY = 150  # of the cases that the config check alone refuses


def told(args: tuple[str, ...]) -> list[str]:
    found = list(fixed_keys(args))
    try:
        resolve(["trainer.accelerator=cpu", *args])
    except UserError as e:
        found += e.problems
    return found


def test_some_of_the_cases_are_refused_by_the_config_check():
    assert len(cases()) > 1000 and len({case.family for case in cases()}) > 10
    kinds = ("a wrong value", "a key is null", "a group is removed", "a name is misspelt")
    chosen = [case for case in cases() if case.family.startswith(kinds) and not case.works]
    for case in chosen[::EVERY]:
        assert any(case.key in text for text in told(case.args)), case.name


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
    a, b = (Case(family, (f"{key}=1",), key) for family, key in ("ax", "by"))
    page = refused.page([Outcome(a, WELL, 1.0, ""), Outcome(b, DIM, 2.0, "")])
    assert "| a | 1 | 1 |" in page
    assert "- unclear: `y=1`" in page
    assert "| all | 2 | 1 |" in page


@pytest.mark.full
def test_all_cases_are_refused_well():
    command, env = [sys.executable, str(Path(ROOT, "benchmarks/refused.py"))], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, check=False, stdout=subprocess.PIPE, text=True)
    refused, well = map(int, re.search(r"^\| all \| (\d+) \| (\d+) \|", done.stdout, re.MULTILINE).groups())
    assert (refused > 1000, well, done.returncode) == (True, refused, 0), done.stdout
