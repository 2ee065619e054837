"""The scripts that commands run, the project's own or Lockstep's, and the jobs that they define."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lockstep import PACKAGE, ROOT, WHEEL
from lockstep.config import project
from lockstep.errors import UserError, did_you_mean
from lockstep.machine.world import World

SCRIPTS = (PACKAGE / "scripts",) if WHEEL else (ROOT, ROOT / "scripts")
EVALUATIONS = ("eval", "predict")  # of a run that there is; all other jobs train
Run = Callable[[DictConfig, World], Any]  # the part of one process


@dataclass(frozen=True)
class Job:
    """What a command does, such as `train` of train.py."""

    name: str  # also the name of its config
    script: Path  # the script that the run's other processes execute
    run: Run


def scripts() -> dict[str, Path]:
    """All scripts by name (train, eval, runs, ...): the project's own if it has one, else Lockstep's."""
    root = project.current().root
    shipped = {path.stem: path for folder in SCRIPTS for path in sorted(folder.glob("*.py"))}
    own = {name: root / f"{name}.py" for name in shipped} if root else {}
    return {name: own[name] if name in own and own[name].is_file() else path for name, path in shipped.items()}


def script(name: str) -> Path:
    """Raises UserError: there is no script of that name."""
    found = scripts()
    if name not in found:
        hint = did_you_mean(name, found)
        raise UserError(f"lockstep {name}: there is no such command{hint}; use one of {', '.join(found)}.")
    return found[name]


def load(path: Path) -> Run:
    """The JOB of a script. Raises UserError: it has none."""
    # Not by runpy, which does not promise that functions outlive it.
    spec = util.spec_from_file_location(f"lockstep_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run: Run | None = getattr(module, "JOB", None)
    if run is None:
        raise UserError(f'{path} has no JOB. Add JOB = launch.job("{path.stem}") to it, or JOB = <your own function>.')
    return run


def job(name: str) -> Run:
    """Lockstep's own job, `train`, `eval` or `predict`, for a project's script that does not define its own."""
    return load(SCRIPTS[0] / f"{name}.py")
