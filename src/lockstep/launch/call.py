"""Runs a job from Python: like its command, but with exceptions instead of exit codes, in the caller's process."""

import os
import sys
from typing import Any

from omegaconf import DictConfig

from lockstep.config.compose import callers_hydra_restored, composed
from lockstep.errors import RunFailed, raise_problems
from lockstep.launch import jobs
from lockstep.launch.cli import command
from lockstep.launch.start import start
from lockstep.machine import process, signals
from lockstep.machine.launchers import launcher_problems
from lockstep.machine.world import World
from lockstep.sweeps import table


def call(name: str, overrides: list[str]) -> Any:
    """Runs `python <name>.py <overrides>` and leaves this process as it was."""
    raise_problems(launcher_problems(os.environ))
    with process.restored():
        cfg = composed(name, overrides)
        script = jobs.script(name)
        return start(jobs.Job(name, script, guarded(jobs.load(script))), cfg, overrides)


def sweep(overrides: list[str]) -> list[dict[str, Any]]:
    """Runs `python train.py -m <overrides>` and leaves this process as it was. Returns the rows of the sweep's table."""
    raise_problems(f"{o}: sweep takes key=value alone, no options." for o in overrides if o.startswith("-"))
    with process.restored(), process.logging_restored(), callers_hydra_restored():
        script = jobs.script("train")
        sys.argv[:] = [str(script), "-m", *overrides]
        table.last.clear()
        signals.received.clear()  # of an earlier call: it would end this sweep
        try:
            command(jobs.Job("train", script, guarded(jobs.load(script))), sys.argv[1:])
        except RunFailed:
            if not table.last:
                raise
        return list(table.last)


def guarded(run: jobs.Run) -> jobs.Run:
    """Runs `run` and restores the state of this process's libraries."""

    def run_and_restore(cfg: DictConfig, world: World) -> Any:
        import lockstep.build  # noqa: F401  # first, so that what an import sets up stays

        with process.libraries_restored():
            return run(cfg, world)

    return run_and_restore
