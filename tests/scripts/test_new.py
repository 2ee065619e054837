"""A project that new.py creates is whole, and its own tests pass."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import new
import pytest

import lockstep
from lockstep import PACKAGE, ROOT
from lockstep.config import checked
from lockstep.errors import UserError
from lockstep.launch.exits import exit_code


def begin(monkeypatch, folder: Path, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["new.py", str(folder), *args])
    return exit_code(new.main)


def texts(folder: Path) -> dict[str, str]:
    """Its files, by their paths."""
    found = [p for p in folder.rglob("*") if p.is_file() and ".git" not in p.relative_to(folder).parts]
    return {p.relative_to(folder).as_posix(): p.read_text(errors="replace") for p in found}


def run(command: str, folder: Path, timeout_s: float = 900, **environment: str) -> str:
    """What a shell prints, in a folder and outside of the tests' environment."""
    outside = ("LOCKSTEP", "TEST_", "PYTEST", "PYTHON", "VIRTUAL")
    env = {k: v for k, v in os.environ.items() if not k.startswith(outside)} | environment
    done = subprocess.run(command, shell=True, cwd=folder, env=env, timeout=timeout_s, capture_output=True, text=True)
    assert done.returncode == 0, command + done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel() -> tuple[str, bytes]:
    return new.build_wheel(ROOT)


@pytest.fixture
def local(wheel, monkeypatch) -> None:
    """Nobody else can reach this checkout, and its wheel is built once."""
    monkeypatch.setattr(new, "git_requirement", lambda: None)
    monkeypatch.setattr(new, "build_wheel", lambda _: wheel)


def test_a_project_is_whole_and_tidy_and_has_its_own_name(tmp_path, monkeypatch, capsys, wheel, local):
    folder = tmp_path / "Flowers"
    assert begin(monkeypatch, folder) == 0
    assert "uv run pytest" in capsys.readouterr().out
    found = texts(folder)
    assert {"pyproject.toml", ".gitignore", ".github/workflows/ci.yml", "tests/test_promises.py"} <= set(found)
    for source in ("train.py", "eval.py", "predict.py", "configs/project.yaml", "configs/strategy/ddp.yaml"):
        assert found[source].replace("flowers", "project") == (ROOT / source).read_text()
    for name in ("model", "module", "data"):
        assert f"src/flowers/{name}.py" in found
        assert f"_target_: flowers.{name}." in "".join(
            text for file, text in found.items() if file.startswith("configs/")
        )
    named = re.compile(r"project\.(model|module|data)\b|src/project")
    assert not [name for name, text in found.items() if named.search(name + text) and not name.startswith("wheels/")]
    assert str(ROOT) not in "".join(found.values())
    for page in ("AGENTS.md", "llms.txt", "README.md"):  # what they link to and name is there
        names = re.findall(r"\]\(([^)#]+)\)|`((?:src|configs|tests)/[\w/.]+)`", found[page])
        assert [name for pair in names for name in pair if name and not (folder / name).exists()] == []
    assert sorted(run("git ls-files", folder).split()) == sorted(found)
    # It depends on a wheel inside it and on the tested versions of what it needs, and of nothing else.
    uv = tomllib.loads(found["pyproject.toml"])["tool"]["uv"]
    file = f"wheels/lockstep-{lockstep.__version__}-py3-none-any.whl"
    assert uv["sources"] == {"lockstep": {"path": file}}
    assert (folder / file).read_bytes() == wheel[1]
    pins = [pin.partition("==")[0] for pin in uv["constraint-dependencies"]]
    assert {"torch", "lightning", "pytest", "sympy"} <= {*pins}
    assert not {"selenium", "psycopg", "kubernetes-validate", "mypy", "hypothesis"} & {*pins}
    assert "://" not in found["pyproject.toml"]
    # Tidy, by the ruff that it pins.
    ruff = f"{sys.executable} -m ruff"
    assert f"ruff=={run(f'{ruff} --version', tmp_path).split()[1]}" in uv["constraint-dependencies"]
    run(f"{ruff} check . && {ruff} format --check .", folder)


def test_a_project_brings_the_checks_of_the_template_that_hold(tmp_path, monkeypatch):
    there = {"src/lockstep": PACKAGE, **{name: ROOT / name for name in ("src/project/module.py", "train.py")}}
    check = {"line": "the same", "config": {"task._target_": "project.module.Classifier"}, "versions": {}, "data": None}
    holds = check | {"sources": {name: checked.digest(path) for name, path in there.items()}}
    stale = check | {"sources": {"train.py": "0" * 16}}
    (tmp_path / "kept.json").write_text(json.dumps([stale, holds]))
    monkeypatch.setattr(checked, "FILE", tmp_path / "kept.json")
    for name in ("src/flowers/module.py", "train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("from flowers.model import Net\n")
    (found,) = new.checks(tmp_path, "flowers")
    assert found["config"] == {"task._target_": "flowers.module.Classifier"}
    assert found["sources"] == dict.fromkeys(
        ["src/flowers/module.py", "train.py"], checked.digest(tmp_path / "train.py")
    )


def test_a_project_is_upgraded_by_one_command(tmp_path, monkeypatch, capsys, local):
    """And changes from a wheel to an address, and back. What the user wrote stays."""
    folder = tmp_path / "a"
    assert begin(monkeypatch, folder, "--package", "flowers") == 0
    first = (folder / "pyproject.toml").read_text()
    own = first.replace('"hydra-core', '"pandas",\n    "hydra-core', 1)
    (folder / "pyproject.toml").write_text(own.replace('    "absl-py==', '    "absl-py==0.0.'))
    address = "lockstep @ git+https://example.org/lockstep.git@v2"
    assert begin(monkeypatch, folder, "--upgrade", "--lockstep", address) == 0
    table = tomllib.loads((folder / "pyproject.toml").read_text())
    assert table["project"]["dependencies"][:2] == [address, "pandas"]
    assert (table["tool"]["uv"]["sources"], list(folder.glob("wheels/*"))) == ({}, [])
    assert begin(monkeypatch, folder, "--upgrade") == 0
    assert (folder / "pyproject.toml").read_text() == own
    assert begin(monkeypatch, tmp_path / "b", "--upgrade") == 2
    assert "--upgrade needs the folder of an existing project" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("remote", "pushed", "expected"),
    [
        ("https://token@example.org/lockstep.git", True, "lockstep @ git+https://example.org/lockstep.git@{}"),
        ("git@example.org:group/lockstep.git", True, "lockstep @ git+ssh://git@example.org/group/lockstep.git@{}"),
        ("https://example.org/lockstep.git", False, None),
        ("/srv/lockstep.git", True, None),
    ],
)
def test_the_default_is_the_remote_that_has_this_commit(remote, pushed, expected, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("a")
    commit = "git add file && git -c user.name=a -c user.email=a commit -qm a"
    run(f"git init -q -b main && {commit} && git remote add origin {remote}", tmp_path)
    if pushed:
        run("git update-ref refs/remotes/origin/main HEAD", tmp_path)
    monkeypatch.setattr(new, "ROOT", tmp_path.resolve())
    assert new.git_requirement() == (expected and expected.format(new.git("rev-parse", "HEAD")))
    (tmp_path / "file").write_text("not committed")
    assert new.git_requirement() is None


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (None, (f"lockstep=={lockstep.__version__}", None)),
        (
            {"url": "https://t@example.org/l.git", "vcs_info": {"vcs": "git", "commit_id": "a1"}},
            ("lockstep @ git+https://example.org/l.git@a1", None),
        ),
        ({"url": "https://example.org/l.whl", "archive_info": {}}, ("lockstep @ https://example.org/l.whl", None)),
        ({"url": "file://FOLDER/l%20a.whl", "archive_info": {}}, (None, ("l a.whl", b"of a file"))),
        ({"url": "file://FOLDER", "dir_info": {}}, (None, ("built.whl", b"of a folder"))),
    ],
)
def test_a_project_depends_on_what_lockstep_was_installed_from(record, expected, tmp_path, monkeypatch):
    (tmp_path / "l a.whl").write_bytes(b"of a file")
    text = record and json.dumps(record).replace("FOLDER", str(tmp_path))
    monkeypatch.setattr(new, "WHEEL", True)
    monkeypatch.setattr(new, "build_wheel", lambda _: ("built.whl", b"of a folder"))
    monkeypatch.setattr(new, "distribution", lambda _: SimpleNamespace(read_text={"direct_url.json": text}.get))
    assert new.dependency() == expected
    if "l%20a" in (text or ""):
        (tmp_path / "l a.whl").unlink()
        with pytest.raises(UserError, match="no longer exists"):
            new.dependency()


def test_a_checkout_without_a_tool_to_build_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(new, "git_requirement", lambda: None)
    builders = ["no-such-program"], [sys.executable, "-c", "raise SystemExit('broken')"]
    monkeypatch.setattr(new, "BUILDERS", builders)
    assert begin(monkeypatch, tmp_path / "a", "--package", "flowers") == 2
    assert "no wheel of Lockstep could be built: broken. Install" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("requirement", "said"), [
    ("lockstep @ git+https://example.org/lockstep.git", "(https://example.org/lockstep)"), ("lockstep>=0.2", "Trains with Lockstep: "),
])  # fmt: skip
def test_a_project_may_depend_on_an_address_or_a_release(requirement, said, tmp_path, monkeypatch):
    assert begin(monkeypatch, tmp_path / "a", "--package", "flowers", "--lockstep", requirement) == 0
    text = texts(tmp_path / "a")["pyproject.toml"]
    assert (f'    "{requirement}",\n' in text, "tool.uv.sources" in text) == (True, False)
    assert said in texts(tmp_path / "a")["README.md"]


@pytest.mark.parametrize(
    ("folder", "args", "told"),
    [
        ("3d", [], "--package 3d is not a valid package name"),
        ("a", ["--package", "3d"], "is not a valid package name"),
        ("a", ["--package", "lockstep"], "is not a valid package name"),
        (".", ["--package", "flowers"], "exists and is not empty"),
    ],
)
def test_what_cannot_be_begun_is_refused_and_nothing_is_written(folder, args, told, tmp_path, monkeypatch, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert begin(monkeypatch, tmp_path / folder, *args) == 2
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("uv"), reason="no uv")
@pytest.mark.parametrize("source", ["wheel", "address"])
def test_a_clone_elsewhere_trains_and_passes_its_own_workflow(source, tmp_path):
    """Without the checkout that made it, and in an environment of its own; it needs a package index."""
    run(f"git clone -q {ROOT} checkout && git clone -q --bare {ROOT} bare.git", tmp_path)
    if source == "wheel":
        run("uv build --quiet --wheel --out-dir ../wheels", tmp_path / "checkout")
        (wheel,) = (tmp_path / "wheels").glob("*.whl")
        run(f"uvx --quiet --from {wheel} lockstep new made --package flowers", tmp_path)
    else:
        address = f"--lockstep 'lockstep @ git+file://{tmp_path}/bare.git'"
        make = f"{sys.executable} checkout/scripts/new.py made --package flowers {address}"
        run(f"PYTHONPATH=checkout/src {make}", tmp_path)
    run("rm -rf checkout wheels", tmp_path)
    run("mkdir elsewhere && git clone -q made elsewhere/flowers", tmp_path)
    clone = tmp_path / "elsewhere/flowers"
    train = "uv run train.py trainer.accelerator=cpu data.source=embedded"
    printed = re.search(r"evaluate it: (.*)", run(train, clone))[1]
    assert printed.startswith("uv run eval.py run=")
    run(printed, clone)
    steps = re.findall(r"- run: (.*)", (clone / ".github/workflows/ci.yml").read_text())
    assert steps == ["uv run ruff check .", "uv run ruff format --check .", "uv run pytest"]
    for step in steps:
        run(step, clone)
    assert run("git status --porcelain", clone) == ""
