"""From a command line to processes that run a job: compose, check, prepare the data, name the run, start."""

import atexit
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib import util
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lockstep import CONFIGS, ROOT
from lockstep.checkpoints import resuming
from lockstep.config.auto import decided
from lockstep.config.checks import check
from lockstep.config.compose import CONFIG_ERRORS, compose_config, explain, tried_alone
from lockstep.config.identity import evaluation_file, identify, restarted, run_dir
from lockstep.errors import Preempted, Pruned, RunFailed, TrainingFailed, UserError, raise_problems
from lockstep.launch import local, out_of_memory, slots
from lockstep.machine import signals
from lockstep.machine.world import ONE_PROCESS, World, rank_of, world_of
from lockstep.reporting.recorder import mark_ended
from lockstep.sweeps import table

if TYPE_CHECKING:
    from lockstep.data.prepare import Prepared

Job = Callable[[DictConfig, World], Any]  # `train` of train.py, `evaluate` of eval.py: one process's part
INTERRUPTED = 130
TRUSTED = ("lockstep.*", "torch.optim.*", "lightning.pytorch.*", "hydra.*", "hydra_plugins.*", "logging.*")


def main(job: Job, name: str) -> None:
    """The body of `train.py` and `eval.py`; exits with 0 done, 2 wrong config or input, 1 failed while running.

    It is the last thing that a script does: the process ends with that code, whoever catches SystemExit.
    """
    ended: list[int] = []
    atexit.register(lambda: leave(ended[0]) if ended else None)  # registered first, called last
    received, given = local.received_job(), slots.received_config()
    if received is not None:
        with signals.noted():
            ended.append(reported(partial(local.report_out_of_memory, partial(job, *received)), received[1].rank))
        if ended[0]:
            leave(ended[0])  # at once: exit handlers might wait for what the failed job has left
    elif given is not None:
        ended.append(reported(partial(start, job, name, *given)))
    else:
        ended.append(reported(partial(command, job, name), rank_of()))
    sys.exit(ended[0])


def leave(code: int) -> NoReturn:
    """Ends the process without taking Python down. Threads of gloo that let go of a tensor meanwhile want Python's lock, are ended
    for that, and abort the process: "terminate called without an active exception", after a run that was done."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed by whoever started the process
        try:
            stream.flush()
        except BrokenPipeError:  # its reader has seen enough
            pass
        except OSError:  # the disk is full
            code = code or 1
    os._exit(code)


def reported(call: Callable[[], Any], rank: int = 0) -> int:
    """Runs `call` and turns its end into an exit code and, on standard error, into words."""
    try:
        call()
    except UserError as e:
        if rank == 0:  # all ranks found the same
            print("\n".join(f"error: {problem}" for problem in e.problems), file=sys.stderr)
        return 2
    except TrainingFailed as e:
        if rank == 0 or not isinstance(e, Preempted | Pruned):
            print(f"error: {e}", file=sys.stderr)
        return 1
    except RunFailed as e:  # the process that failed has said why
        return e.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit:
        if signals.received:  # Lightning's answer to SIGTERM
            return 1
        raise
    except Exception:
        prefix = f"[rank {rank}] " if rank else ""
        print("".join(prefix + line + "\n" for line in traceback.format_exc().splitlines()), end="", file=sys.stderr)
        return 1
    return 0


def command(job: Job, name: str) -> None:
    """Hydra reads the command line; a multirun's jobs are told apart from a single run here."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # exceptions come to us instead of Hydra's own report and exit code
    overrides = [arg for arg in sys.argv[1:] if not arg.startswith("-") and ("=" in arg or arg.startswith("~"))]
    if {"-m", "--multirun"} & set(sys.argv):  # Hydra would write multirun.yaml before it finds a mistake
        if name == "eval":
            raise UserError("eval.py evaluates one run at a time. Leave -m out.")
        raise_problems(tried_alone(name, overrides)[0])
    # A launcher may send it to another process: it must not refer to anything of this one.
    outcome: list[int] = []
    task = partial(one_job, job, name, outcome)
    task.__module__, task.__name__ = __name__, name  # type: ignore[attr-defined]  # Hydra asks for both
    try:
        hydra.main(config_path=str(CONFIGS), config_name=name, execution_whitelist=list(TRUSTED))(task)()
    except CONFIG_ERRORS as e:
        raise UserError(*explain(e, name, overrides)) from None
    if any(outcome):
        raise RunFailed("it has said why", max(outcome))


def one_job(job: Job, name: str, outcome: list[int], cfg: DictConfig) -> dict[str, Any] | None:
    """A single run, whose exit code goes to `outcome`; or one job of a multirun, which raises RunFailed. Hydra calls it."""
    hydra_cfg = HydraConfig.get()
    overrides = list(hydra_cfg.overrides.task)
    multirun = hydra_cfg.mode == RunMode.MULTIRUN
    cfg = table.named(cfg, hydra_cfg) if multirun else cfg
    result: list[dict[str, Any]] = []
    code = reported(lambda: result.append(start(job, name, cfg, overrides)), rank_of())
    if not multirun:
        outcome.append(code)
        return None
    if rank_of() == 0:
        table.record(run_dir(cfg), overrides, failed=bool(code))
    if code == INTERRUPTED or signals.received:
        raise KeyboardInterrupt  # ends a multirun as a whole
    if code:
        raise RunFailed(f"{cfg.run} failed", code)  # Hydra marks it and goes on
    return result[0]


def call(name: str, overrides: list[str]) -> dict[str, Any]:
    """What `python <name>.py <overrides>` does, from Python: exceptions instead of exit codes."""
    try:
        cfg = compose_config(name, overrides)
    except CONFIG_ERRORS as e:
        raise UserError(*explain(e, name, overrides)) from None
    spec = util.spec_from_file_location(f"lockstep_{name}", ROOT / f"{name}.py")
    assert spec is not None and spec.loader is not None
    script = util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return start(script.JOB, name, cfg, overrides)


def found_data(cfg: DictConfig) -> "Prepared":
    """Prepares the data and says loudly when it is not the whole set."""
    from lockstep.data.prepare import prepare  # numpy and filelock, 0.2 s: not for --help or a mistake

    found = prepare(cfg.data)
    if found.source == "embedded" and cfg.data.source == "auto" and rank_of() == 0:
        print(
            f"WARNING: no MNIST in data.root={cfg.data.root}, and no mirror answers: using the EMBEDDED SUBSET of 5,000 "
            "images (4,000 to train and validate, 1,000 to test). Type data.root=<folder> for the whole set.",
            file=sys.stderr,
        )
    return found


def start(job: Job, name: str, cfg: DictConfig, overrides: list[str]) -> dict[str, Any]:
    """Runs `job` in as many processes as the config asks for; returns what it wrote as its result.

    Nothing is written to the run directory, and torch is not imported, before the config and the data are right.

    Raises:
        UserError: the config or the input is wrong.
        RunFailed: another process failed; it has said why.
        TrainingFailed: it went wrong in a way that is known, as when memory runs out.
    """
    evaluating = name == "eval"
    again = not evaluating and (cfg.resume == "auto" or restarted())
    if not evaluating and not cfg.resume:  # otherwise the run's own config is still to come
        raise_problems(check(cfg))
    cfg = resuming.for_evaluation(cfg, overrides) if evaluating else resuming.for_training(cfg, overrides)
    raise_problems(check(cfg, evaluating=evaluating))
    world = world_of(cfg)
    data = found_data(cfg)
    cfg = identify(decided(cfg, world, data), data.source)
    if again and not cfg.resume and world.rank == 0:  # it died before its first checkpoint
        out_of_memory.begin_anew(cfg)
    in_processes = partial(local.run_processes, ROOT / f"{name}.py")
    with signals.noted():
        try:
            if cfg.trainer.accumulate_grad_batches == "auto":
                out_of_memory.until_it_fits(in_processes, cfg, world)
            elif world.external or world.strategy in ONE_PROCESS:
                job(cfg, world)
            else:
                in_processes(cfg, world)
        except BaseException as e:
            if world.rank == 0:
                mark_ended(run_dir(cfg), e)
            signals.requeue(world.rank)
            raise
    path = evaluation_file(cfg) if name == "eval" else run_dir(cfg) / "report.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}  # another node's disk may have it
    return result
