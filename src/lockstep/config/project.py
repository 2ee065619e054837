"""The project of a command: its folder, its configs, and the packages that its configs may name.

A project is a folder whose pyproject.toml has a table [tool.lockstep]. Free of torch and of Hydra.
"""

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
import tomllib
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lockstep import CONFIGS, PACKAGE, TEMPLATE
from lockstep.errors import UserError

VARIABLE = "LOCKSTEP_PROJECT"  # the project's root, for child processes; empty if there is no project


@dataclass(frozen=True)
class Project:
    """A project; by default no project, only Lockstep."""

    root: Path | None = None
    installed: tuple[str, ...] = ()  # the key `packages` of [tool.lockstep]: packages outside of src/

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages that configs may name, in addition to Lockstep's own list."""
        own = packages_in(self.root / "src") if self.root else ()
        return tuple(dict.fromkeys((*own, *self.installed, *TEMPLATES)))


def packages_in(source: Path) -> list[str]:
    """The packages in a folder, with or without an __init__.py, and the modules there."""
    names = [
        path.name.removesuffix(".py") for path in sorted(source.glob("*")) if path.is_dir() or path.suffix == ".py"
    ]
    return [name for name in names if name.isidentifier() and not name.startswith("__")]


# The template's packages. Its configs are used where a project has no config of the same name.
TEMPLATES = [name for name in packages_in(TEMPLATE / "src") if name not in (PACKAGE.name, "hydra_plugins")]


def read(root: Path) -> Project | None:
    """The project with this folder as its root.

    Raises:
        UserError: its pyproject.toml is damaged, or its table [tool.lockstep] has an unknown key or a wrong value.
    """
    file = root / "pyproject.toml"
    try:
        table: Any = table_of(file.read_text(encoding="utf-8") if file.is_file() else "")
    except tomllib.TOMLDecodeError as e:
        raise UserError(f"{file}: {e}. Correct the file.") from None
    if table is None:
        return None
    names = table.get("packages", []) if isinstance(table, dict) and table.keys() <= {"packages"} else None
    if not isinstance(names, list) or not all(part.isidentifier() for name in names for part in str(name).split(".")):
        example = 'packages = ["monai"]'
        raise UserError(f"{file}: the only key of tool.lockstep is packages, a list of package names: {example}.")
    return Project(root, tuple(names))


@cache
def table_of(pyproject: str) -> object:
    """[tool.lockstep] of the content of a pyproject.toml. Cached, because each override needs the project's folders."""
    return tomllib.loads(pyproject).get("tool", {}).get("lockstep") if "lockstep" in pyproject else None


def find(folder: Path) -> Project:
    """The nearest project at or above `folder`; if there is none, a Project without a root."""
    folder = folder.resolve()
    return next((project for root in (folder, *folder.parents) if (project := read(root))), Project())


def current() -> Project:
    """The project of this process: the one set by `enter`, else that of the current directory."""
    root = os.environ.get(VARIABLE)
    if root is None:
        return find(Path.cwd())
    project = read(Path(root)) if root else Project()
    if project is None:
        raise UserError(f"{VARIABLE}={root}: {root}/pyproject.toml has no table [tool.lockstep]. Unset {VARIABLE}.")
    return project


def enter(folder: Path) -> None:
    """Makes the project at or above `folder` the project of this process and its children."""
    os.environ.setdefault(VARIABLE, str(find(folder).root or ""))
    previous_path = list(sys.path)
    make_importable()
    new_folders = [path for path in sys.path if path not in previous_path]
    if new_folders:  # a SLURM job is unpickled before it can look up its project
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *new_folders]))


def environment() -> dict[str, str]:
    """Environment variables for child processes."""
    return {VARIABLE: str(current().root or "")}


def make_importable() -> None:
    """Adds src/ of the project and of the template to sys.path if it contains packages that are not installed."""
    for root in filter(None, (current().root, TEMPLATE)):
        absent = any(importlib.util.find_spec(name) is None for name in packages_in(root / "src"))
        if str(root / "src") not in sys.path and absent:
            sys.path.append(str(root / "src"))


def is_user_code_error(error: BaseException) -> bool:
    """Whether an error passed through code of the project, or any code that is not installed.

    If so, it is a bug to show with its traceback, not a user error to explain.
    """
    if isinstance(error, UserError):
        return False
    if "Original Traceback" in str(error):  # torch's text for an error in a DataLoader worker
        return True
    packages, libraries = current().packages, [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    for frame, _ in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE) or file.name.startswith("<"):
            continue
        if f"{frame.f_globals.get('__name__')}.".startswith(tuple(f"{package}." for package in packages)):
            return True
        if not any(file.is_relative_to(library) for library in libraries):
            return True
    return False


def python() -> str:
    """How this process's Python is typed: `uv run`, `python` or its path."""
    by_uv = "UV" in os.environ and os.environ.get("VIRTUAL_ENV") == sys.prefix  # both set by `uv run`
    return "uv run" if by_uv else short(Path(sys.executable))


def short(program: Path) -> str:
    """A program's name if the shell finds it under that name, else its path."""
    return program.name if shutil.which(program.name) == str(program) else shlex.quote(str(program))


def command(name: str) -> str:
    """The command that runs a job or script of this project."""
    root, prefix = current().root, python()
    for script in (root / f"{name}.py", root / "scripts" / f"{name}.py") if root else ():
        if script.is_file():
            return f"{prefix} {shlex.quote(min(os.path.relpath(script), str(script), key=len))}"
    exe = Path(sys.executable).with_name("lockstep")
    start = "uv run lockstep" if prefix == "uv run" else short(exe) if exe.is_file() else f"{prefix} -m lockstep"
    return f"{start} {name}"


def config_folders() -> list[Path]:
    """The config folders in order of precedence: the project's, the template's, Lockstep's."""
    folders = [root / "configs" for root in dict.fromkeys((current().root, TEMPLATE)) if root]
    return [*(folder for folder in folders if folder.is_dir()), CONFIGS]
