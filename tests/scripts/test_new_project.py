"""A project that new_project.py begins is whole, and its own tests pass."""

import os
import subprocess
import sys
from pathlib import Path

import new_project
import pytest

from lockstep import ROOT
from lockstep.launch.exits import exit_code


def begin(monkeypatch, folder: Path, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["new_project.py", str(folder), *args])
    return exit_code(new_project.main)


def texts(folder: Path) -> dict[str, str]:
    """Its files, by their paths."""
    found = [p for p in folder.rglob("*") if p.is_file() and ".git" not in p.relative_to(folder).parts]
    return {p.relative_to(folder).as_posix(): p.read_text(errors="replace") for p in found}


def committed(folder: Path) -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=folder, capture_output=True, text=True, check=True)
    return sorted(done.stdout.split())


@pytest.mark.parametrize("data", new_project.DATA)
def test_a_thin_project_has_its_own_name_and_nothing_of_the_templates(data, tmp_path, monkeypatch, capsys):
    assert begin(monkeypatch, tmp_path / "a", "--package", "flowers", "--data", data) == 0
    assert "uv run pytest" in capsys.readouterr().out
    found = texts(tmp_path / "a")
    assert {
        "train.py",
        "eval.py",
        "predict.py",
        "pyproject.toml",
        ".gitignore",
        "configs/project.yaml",
        "src/flowers/model.py",
    } <= set(found)
    assert ("src/flowers/data.py" in found) is (data == "arrays")
    assert ("configs/data/flowers.yaml" in found) is (data != "none")
    assert not [name for name, text in found.items() if "my_project" in name + text or "LOCKSTEP_ADDRESS" in text]
    assert committed(tmp_path / "a") == sorted(found)
    assert f'lockstep = {{path = "{os.path.relpath(ROOT, tmp_path / "a")}"' in found["pyproject.toml"]


def test_a_thin_project_may_depend_on_an_address(tmp_path, monkeypatch):
    address = "lockstep @ git+https://example.org/lockstep.git"
    assert begin(monkeypatch, tmp_path / "a", "--package", "flowers", "--lockstep", address) == 0
    text = texts(tmp_path / "a")["pyproject.toml"]
    assert (f'    "{address}",\n' in text, "tool.uv.sources" in text) == (True, False)
    assert "(git+https://example.org/lockstep.git)" in texts(tmp_path / "a")["README.md"]


def test_a_thin_project_may_depend_on_a_release(tmp_path, monkeypatch):
    assert begin(monkeypatch, tmp_path / "a", "--package", "flowers", "--lockstep", "lockstep>=0.2") == 0
    assert "Trains with Lockstep: " in texts(tmp_path / "a")["README.md"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--package", "3d"], "is not a valid package name"),
        (["--package", "lockstep"], "is not a valid package name"),
        (["--package", "flowers", "--strip"], "--strip has no effect"),
    ],
)
def test_what_cannot_be_begun_is_refused_and_nothing_is_written(args, told, tmp_path, monkeypatch, capsys):
    assert begin(monkeypatch, tmp_path / "a", *args) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert begin(monkeypatch, tmp_path, "--package", "flowers") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param("folder", marks=pytest.mark.full),
        pytest.param("arrays", marks=pytest.mark.full),
        pytest.param("none", marks=pytest.mark.full),
    ],
)
def test_the_tests_of_a_thin_project_pass(data, tmp_path, monkeypatch):
    assert begin(monkeypatch, tmp_path / "a", "--package", "flowers", "--data", data) == 0
    done = run_tests(tmp_path / "a")
    assert (done.returncode, "3 passed" in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("strip", [[], ["--strip"]])
def test_the_tests_of_a_full_project_pass(strip, tmp_path, monkeypatch):
    assert begin(monkeypatch, tmp_path / "a", "--package", "flowers", "--full", *strip) == 0
    found = texts(tmp_path / "a")
    assert not [name for name, text in found.items() if name.endswith(".py") and "lockstep" in (name + text).lower()]
    done = run_tests(tmp_path / "a", "-n0", "--collect-only", "-m", "")  # every file of tests finds what it imports
    assert done.returncode == 0, done.stdout + done.stderr
    done = run_tests(
        tmp_path / "a",
        "-n0",
        "tests/test_layers.py",
        "tests/config",
        "tests/data/test_folder.py",
        "tests/test_strategies_agree.py",
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run_tests(folder: Path, *args: str) -> subprocess.CompletedProcess:
    """The project's tests as in an environment where it is installed."""
    path = os.pathsep.join([str(folder / "src"), str(ROOT / "src")])
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP", "TEST_", "PYTEST"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args],
        cwd=folder, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
