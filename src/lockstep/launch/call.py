"""Runs a job from Python: like its command, but with exceptions instead of exit codes, in the caller's process."""

import os
from typing import Any

from omegaconf import DictConfig

from lockstep.config.compose import CONFIG_ERRORS, compose_config, explain
from lockstep.errors import UserError, raise_problems
from lockstep.launch import jobs
from lockstep.launch.start import start
from lockstep.machine import process
from lockstep.machine.launchers import launcher_problems
from lockstep.machine.world import World


def call(name: str, overrides: list[str]) -> dict[str, Any]:
    """Runs `python <name>.py <overrides>` and leaves this process as it was."""
    raise_problems(launcher_problems(os.environ))
    with process.restored():
        try:
            cfg = compose_config(name, overrides)
        except CONFIG_ERRORS as e:
            raise UserError(*explain(e, name, overrides)) from None
        script = jobs.script(name)
        return start(jobs.Job(name, script, guarded(jobs.load(script))), cfg, overrides)


def guarded(run: jobs.Run) -> jobs.Run:
    """Runs `run` and restores the state of this process's libraries."""

    def run_and_restore(cfg: DictConfig, world: World) -> Any:
        import lockstep.build  # noqa: F401  # first, so that what an import sets up stays

        with process.libraries_restored():
            return run(cfg, world)

    return run_and_restore
