"""The command line `python train.py key=value ...`, and its counterpart in Python, which raises instead of exiting."""

import atexit
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lockstep import CONFIGS, PACKAGE
from lockstep.config import checks, compose, project
from lockstep.config.draft import Draft, value_errors
from lockstep.config.schema import RECIPES
from lockstep.errors import RunFailed, SaveFailed, UserError, chain, raise_problems
from lockstep.launch import local
from lockstep.launch.exits import INTERRUPTED, after_output, exit_code
from lockstep.launch.local import Job
from lockstep.launch.start import FIRST, start
from lockstep.machine import process
from lockstep.machine.files import to_json
from lockstep.machine.world import TORCHRUN, external_launcher, launcher_problems, rank_of

# --- The command line: `python train.py key=value ...` ---

# Targets that the hydra node may have, in addition to the packages of the project.
TRUSTED = ("lockstep.*", "torch.optim.*", "lightning.pytorch.*", "hydra.*", "hydra_plugins.*", "logging.*")


def main(job: Job) -> None:
    """The body of `train.py`, `eval.py` and `predict.py`.

    Call it last in a script: it ends the process, even if SystemExit is caught. Exit codes: 0 done, 1 failed while
    running, 2 wrong config or input.

    The process is a command, perhaps one of several that torchrun or SLURM started; or Lockstep started it for a rank
    of a run or for a job of a multirun.
    """
    process.protect_streams()
    exit_codes: list[int] = []
    atexit.register(process.LastOfAll(exit_codes))
    process.is_command = True
    handover = local.received_handover()
    problems = launcher_problems(os.environ) if handover is None else []
    launcher = None if problems else external_launcher(os.environ)
    rank = 0 if problems else rank_of()  # 0 if the rank is unknown, because rank 0 reports the problems
    if launcher == TORCHRUN:
        # Without torchrun's agent, a new process would wait `strategy.timeout_s` for the others, and a training
        # process would keep running.
        message = f"error: torchrun's agent (process {os.getppid()}) has ended, so its processes end too."
        process.end_with_parent(has_pipe=False, message=message if os.environ["LOCAL_RANK"] == "0" else "")

    def run_process() -> None:
        project.enter(job.script.parent)
        raise_problems(problems)
        if handover is None:
            (command_with_json if "--json" in sys.argv else command)(job, sys.argv[1:])
        elif isinstance(handover.work, Draft):
            start(job, handover.work, list(handover.overrides))
        else:
            local.run_in_this_process(job, handover.work, end_file=handover.end_file)

    with process.recording_signals(interrupt=process.end_once) if process.started_by_lockstep else nullcontext():
        exit_codes.append(exit_code(run_process, rank))
    if exit_codes[0] and (process.started_by_lockstep or launcher):
        process.report_failure(rank)
        process.exit_process(exit_codes[0])  # at once, because exit handlers might wait for something of the failed job
    exit_codes[0] = after_output(exit_codes[0])
    sys.exit(exit_codes[0])


def command_with_json(job: Job, argv: list[str]) -> None:
    """Like `command`, but prints only the result on standard output, as JSON, and everything else on standard error.

    Raises:
        UserError: the command has no result, such as a multirun or a help text.
        SaveFailed: the result could not be written.
    """
    idle = [arg for arg in argv if arg.startswith("-") and arg.partition("=")[0] not in WITH_JSON]
    raise_problems(f"--json prints the result of one run, so it has no effect with {arg}. Remove one." for arg in idle)
    sys.stdout.flush()
    stdout = process.Stream(os.fdopen(os.dup(1), "wb"), "utf-8")
    os.dup2(2, 1)  # for the run's other processes as well
    sys.stdout = sys.stderr
    result = command(job, [arg for arg in argv if arg != "--json"])
    if rank_of() == 0:
        if not result:  # a read-only disk
            raise SaveFailed(f"the result of {job.name}.py could not be written, so --json has nothing to print.")
        print(to_json(result), file=stdout, flush=True)


def command(job: Job, argv: list[str]) -> dict[str, Any] | None:
    """Lets Hydra read the command line, then runs a single run or the jobs of a multirun. Returns the result of a run."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises exceptions instead of printing its own report and exiting
    raise_problems(option_errors(argv))
    if {"-h", "--help"} & set(argv):
        from lockstep.launch import help

        print(help.text(job, argv))
        return None
    search_path = compose.search_path(argv)
    overrides = [arg for arg in argv if not arg.startswith("-") and ("=" in arg or arg.startswith("~"))]
    compose.warn_of_replaced_choices(overrides)
    sys.argv[1:] = argv  # Hydra reads it
    multirun = {"-m", "--multirun"} & set(argv)
    if multirun:  # check now: Hydra writes multirun.yaml before it detects an error
        if not job.trains:
            raise UserError(f"{job.name}.py handles one run at a time. Remove -m.")
        raise_problems(compose.compose_each(job.name, overrides, search_path)[0])
        keys = (*FIRST, *RECIPES, "hydra/sweeper")
        chosen = [compose.expand_sweep(override)[0] for override in overrides if compose.key_of(override) in keys]
        first = Draft(compose.compose_config(job.name, [*search_path, *chosen], with_hydra=True))
        raise_problems(filter(None, value_errors(first, FIRST).values()))
        if first.tree.hydra.runtime.choices["hydra/sweeper"] == "basic":  # a study numbers its own trials
            from lockstep.launch import sweeps

            raise_problems(sweeps.numbering_problems(first.folder.path, overrides))
    # A launcher may pickle the task for a different process, so it must not refer to objects of this one.
    outcome: list[tuple[int, dict[str, Any] | None]] = []
    task: Any = partial(one_job, job, outcome)
    task.__module__, task.__name__ = __name__, job.name  # Hydra reads both
    task.script = job.script  # for hydra_plugins/lockstep_plugins.py
    whitelist = [*TRUSTED, *(f"{package}.*" for package in project.current().packages)]
    try:
        hydra.main(config_path=str(CONFIGS), config_name=job.name, execution_whitelist=whitelist)(task)()
    except RunFailed:  # a job of a multirun, which has already reported its error
        raise
    except compose.CONFIG_ERRORS as e:
        raise UserError(*checks.explain(e, job.name, overrides, search_path)) from None
    except Exception as e:
        if not multirun:  # the command of a multirun has been checked above
            checks.composed(job.name, overrides, search_path)  # raises a UserError if the command is wrong
        files = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(e.__traceback__)]
        is_ours = any(file.is_relative_to(PACKAGE.parent) for file in files[1:])  # of a job or of Lockstep's plugins
        if not is_ours and any(compose.key_of(o).startswith("hydra") for o in overrides):
            raise UserError(f"Hydra: {[*chain(e)][-1]}") from None
        raise
    code, result = outcome[0] if outcome else (0, None)
    if code:
        raise RunFailed("the failed process printed the reason", code)
    return result


WITH_JSON = ("--json", "--config-dir", "-cd")
# Options and keys of Hydra that would run a different config or have no effect, and what to pass instead.
HYDRA = {
    "-cn|-cp|--config-(name|path)|--experimental-rerun": "Pass experiment=<name>, with --config-dir=<folder> for your own configs",
    "hydra.mode": "Pass -m for a multirun",
    "hydra.run.*|hydra.sweep.(dir|subdir)": "Name the folder with run=<name> and runs_dir=<folder>",
}


def option_errors(argv: list[str]) -> Iterator[str]:
    """Errors for options and keys of Hydra that would run a different config or have no effect."""
    multirun = {"-m", "--multirun"} & set(argv)
    for arg in argv:
        name = arg.partition("=")[0].lstrip("+~").replace("/", ".")
        if instead := [advice for names, advice in HYDRA.items() if re.fullmatch(names, name)]:
            yield f"{arg}: {name} cannot be set. {instead[0]}."
        elif name.startswith(("hydra.sweep", "hydra.launcher")) and not multirun:
            yield f"{arg}: {name} has no effect without a multirun. Add -m."


def one_job(job: Job, outcome: list[tuple[int, Any]], cfg: DictConfig) -> dict[str, Any] | None:
    """Hydra's task function. Appends a run's exit code and result to `outcome`; in a multirun, a failed job raises RunFailed."""
    hydra_cfg = HydraConfig.get()
    overrides = list(hydra_cfg.overrides.task)
    multirun = hydra_cfg.mode == RunMode.MULTIRUN
    draft, result = Draft(cfg), list[dict[str, Any]]()
    if multirun:
        from lockstep.launch import sweeps  # imports rich; an invalid command need not wait for that

        draft = sweeps.job_draft(draft, hydra_cfg.sweep.dir, hydra_cfg.job.num)
    code = exit_code(lambda: result.append(start(job, draft, overrides)), rank_of())
    if not multirun:
        outcome.append((code, result[0] if result else None))
        return None
    if code and rank_of() == 0:
        sweeps.record_failure(draft.folder, overrides)
    if code == INTERRUPTED or process.received:
        raise KeyboardInterrupt  # ends the whole multirun
    if code:
        raise RunFailed(f"{draft.run} failed", code)  # Hydra marks the job as failed and continues
    return result[0]


# --- Runs from Python: like the command, but in the caller's process and with exceptions instead of exit codes ---


def call(name: str, overrides: list[str]) -> Any:
    """Runs `python <name>.py <overrides>` in this process and restores its state."""
    raise_problems(launcher_problems(os.environ))
    with process.restore_process_state():
        compose.warn_of_replaced_choices(overrides)
        return start(local.load(local.script(name)), Draft(checks.composed(name, overrides)), overrides)


def sweep(overrides: list[str]) -> list[dict[str, Any]]:
    """Runs `python train.py -m <overrides>` in this process and restores its state. Returns the rows of the table."""
    raise_problems(launcher_problems(os.environ))
    from lockstep.launch import sweeps

    raise_problems(f"{o}: sweep accepts only key=value, no options." for o in overrides if o.startswith("-"))
    with process.restore_process_state(), process.logging_restored(), compose.hydra_state_restored():
        job = local.load(local.script("train"))
        sys.argv[:] = [str(job.script), "-m", *overrides]
        sweeps.last.clear()
        process.received.clear()  # a signal of an earlier call would end this sweep
        try:
            command(job, sys.argv[1:])
        except RunFailed:
            if not sweeps.last:
                raise
        return list(sweeps.last)
