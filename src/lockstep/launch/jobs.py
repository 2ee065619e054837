"""The jobs that a command runs, and the scripts that hold them: the project's own, or Lockstep's."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lockstep import JOBS
from lockstep.config import project
from lockstep.errors import UserError
from lockstep.machine.world import World

Run = Callable[[DictConfig, World], Any]  # one process's part


@dataclass(frozen=True)
class Job:
    """What a command does: `train` of train.py."""

    name: str  # and that of its config
    script: Path  # what the run's other processes execute
    run: Run


def script(name: str) -> Path:
    """The project's own `<name>.py`, or Lockstep's."""
    root = project.current().root
    own = root / f"{name}.py" if root else None
    return own if own and own.is_file() else JOBS / f"{name}.py"


def load(path: Path) -> Run:
    """The JOB of a script. Raises UserError: it has none."""
    spec = util.spec_from_file_location(f"lockstep_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run: Run | None = getattr(module, "JOB", None)
    if run is None:
        raise UserError(f'{path} has no JOB. Type JOB = launch.job("{path.stem}") in it, or a function of your own.')
    return run


def job(name: str) -> Run:
    """Lockstep's own job, `train` or `eval`, for a project whose script does not say it anew."""
    return load(JOBS / f"{name}.py")
