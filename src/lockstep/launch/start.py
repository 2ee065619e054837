"""From a composed config to the processes of a run: checks, prepares the data, names the run, starts."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from lockstep.checkpoints import resuming
from lockstep.checkpoints.resuming import already_finished
from lockstep.config import project
from lockstep.config.auto import decided
from lockstep.config.checks import check, resolved, wrong_values
from lockstep.config.components import about_problems, imported_problems
from lockstep.config.compose import composed, key_of, without_replaced_defaults
from lockstep.config.identity import evaluation_file, identify, restarted, run_dir
from lockstep.config.rules import step_problems
from lockstep.config.schema import PREDICT
from lockstep.config.words import readable
from lockstep.errors import raise_problems
from lockstep.launch import local
from lockstep.launch.jobs import EVALUATIONS, Job
from lockstep.launch.request import with_request
from lockstep.machine import files, process
from lockstep.machine.files import refuse_unwritable
from lockstep.machine.hardware import why_no_gpu
from lockstep.machine.world import World, rank_of, world_of
from lockstep.reporting.recorder import Recorder, mark_ended
from lockstep.reporting.runs_page import Report

FIRST = ("run", "runs_dir", "resume", "init_from")  # a resumed run's own config is found by them
SPLITTING = ("batch_size", "val_fraction", "folds", "fold", "limit_train")
RESTART_S = 120.0  # a restarted run waits so long for the one before it: a file server notices late that a node is gone

if TYPE_CHECKING:
    from lockstep.data.dataset import DataSet


def prepare_data(cfg: DictConfig, *, evaluating: bool = False) -> "tuple[DataSet, int] | tuple[None, None]":
    """Prepares the data, once for all processes, and warns if it is not the whole set.

    Returns the data and the number of training samples; None for a LightningDataModule, which prepares its data in training.
    """
    from lockstep.config.instantiate import create_data, has_own_loaders
    from lockstep.data.sampler import splits

    if has_own_loaders(cfg):
        return None, None
    data: DataSet = create_data(cfg)
    data.prepare()
    train, *_ = splits(data, **{key: cfg.data[key] for key in SPLITTING if key in cfg.data})
    if not evaluating:
        raise_problems([*about_problems(cfg, data.about), *step_problems(cfg, train.count)])
    if data.notice and rank_of() == 0:
        print(readable(f"WARNING: {data.notice}"), file=sys.stderr)
    return data, train.count


def checked(overrides: list[str]) -> tuple[DictConfig, World]:
    """The config of a training, with its processes, for scripts that train differently. Raises UserError: it is wrong."""
    project.make_importable()
    cfg = composed("train", overrides)
    raise_problems(check(cfg))
    world = world_of(cfg)
    raise_problems(imported_problems(cfg, world))
    return cfg, world


def runs_here(world: World) -> bool:
    """Whether this process itself trains, instead of starting others that do."""
    return world.external is not None or world.one_process


def start(job: Job, cfg: DictConfig, overrides: list[str]) -> dict[str, Any]:
    """Runs `job` in as many processes as the config asks for; returns the result that it wrote.

    Before the config and the data are checked, nothing is written to the run directory, and torch is imported only to check
    the user's own classes and keys without a Kind.

    Raises:
        UserError: the config or the input is wrong.
        RunFailed: another process failed; it printed the reason.
        TrainingFailed: training failed for a known reason, such as out of memory.
    """
    project.make_importable()
    evaluating, predicting = job.name in EVALUATIONS, job.name == "predict"
    raise_problems(wrong_values(cfg, (*FIRST, *(PREDICT if predicting else ()))))
    cfg = cfg if evaluating else without_replaced_defaults(cfg, overrides)
    fresh = not evaluating and not cfg.resume  # otherwise the run's own config is loaded first
    again = not evaluating and (cfg.resume == "auto" or restarted())
    composed_cfg, (cfg, _, unresolved) = cfg, resolved(cfg)  # `${now:%S}` would be another value at each look
    raise_problems(check(composed_cfg) if fresh else unresolved)
    if not evaluating and rank_of() == 0:
        refuse_unwritable(run_dir(cfg) if cfg.run else Path(cfg.runs_dir), "runs_dir")
    asked = cfg
    cfg = resuming.for_evaluation(cfg, overrides, job.name) if evaluating else resuming.for_training(cfg, overrides)
    # a fresh run has got no more than its name and the path of its weights
    raise_problems(wrong_values(cfg, FIRST) if fresh and not cfg.resume else check(cfg, evaluating=evaluating))
    if predicting:
        cfg = with_request(cfg, asked, overrides)
    world = world_of(cfg)
    try:
        raise_problems(imported_problems(cfg, world, evaluating=evaluating))
        of_files = predicting and cfg.predict.part is None
        data, samples = (None, None) if of_files else prepare_data(cfg, evaluating=evaluating)
    except Exception as e:
        if not evaluating and project.of_users_code(e):
            Recorder(identify(cfg, None), world).__exit__(type(e), e, e.__traceback__)
        raise
    if world.accelerator == "cpu" and cfg.trainer.accelerator == "auto" and world.rank == 0 and (why := why_no_gpu()):
        print(f"WARNING: running on the CPU: {why}.", file=sys.stderr)
    experiment = next((o.partition("=")[2] for o in overrides if key_of(o) == "experiment"), None)
    cfg = identify(decided(cfg, world, data, samples), data.source if data else None, experiment)
    if not evaluating and (told := already_finished(cfg, samples)):
        if world.rank == 0:
            print(readable(told))
        return Report(Path(cfg.resume).resolve().parents[1])
    if not evaluating and world.rank == 0:
        files.refuse_if_taken(run_dir(cfg), RESTART_S if restarted() else 0.0)
    if again and not cfg.resume and world.rank == 0:  # the run died before its first checkpoint
        local.begin_anew(cfg)
    execute(job, cfg, world)
    if not evaluating:
        return Report(run_dir(cfg))
    path = evaluation_file(cfg, job.name)
    result: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}  # it may be on another node's disk
    return result


def execute(job: Job, cfg: DictConfig, world: World) -> None:
    """Runs the job in this process or in others. A failure is recorded, and a pre-empted run goes back into its queue."""
    in_processes = partial(local.run_processes, job.script)
    with process.noted():
        try:
            if cfg.trainer.accumulate_grad_batches == "auto":
                local.until_it_fits(in_processes, cfg, world)
            elif runs_here(world):
                job.run(cfg, world)
            else:
                in_processes(cfg, world)
        except BaseException as e:
            if world.rank == 0:
                mark_ended(run_dir(cfg), e)
            process.requeue(world.rank)
            raise
