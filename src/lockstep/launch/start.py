"""From a composed config to the processes of a run: checks the config, prepares the data, starts them."""

import gc
import json
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep.checkpoints.finding import checkpoint_if_any
from lockstep.config import project
from lockstep.config.checks import check, check_classes, step_problems
from lockstep.config.compose import fixed_keys, key_of, needs_signature_check, without_replaced_defaults
from lockstep.config.draft import Draft, value_error, value_errors, was_restarted
from lockstep.config.formatting import inline, pluralize, warn
from lockstep.config.run_config import Request
from lockstep.config.schema import EVALUATE, PREDICT
from lockstep.config.settings import OF_NETWORK, Settings
from lockstep.errors import UserError, raise_problems
from lockstep.launch import local
from lockstep.launch.local import Job
from lockstep.machine import files, process
from lockstep.machine.world import World, keep_freed_memory, rank_of, why_no_gpu
from lockstep.run import PATIENCE_S

FIRST = ("run", "runs_dir", "resume", "init_from", "debug_rank")  # keys that locate the config of a resumed run
SPLITTING = ("batch_size", "val_fraction", "val_gap", "folds", "fold", "limit_train")
RESTART_S = 120.0  # how long a restarted run waits for the previous one: a file server notices late that a node is gone

# NumPy, rich and Jinja take as long to import as Hydra, so functions import them after the config is checked.
if TYPE_CHECKING:
    from lockstep.data.dataset import DataSet
    from lockstep.reporting.report import Report


def prepare_data(job: Job, settings: Settings) -> "tuple[Settings, DataSet | None, int | None]":
    """Prepares the data once for all processes, and warns if it is incomplete.

    Returns the settings decided from the data, the data if this process trains on it, and the number of training
    samples. A LightningDataModule prepares its data in training.
    """
    from lockstep.data.splits import splits

    # How images become squares may depend on the network. Its library takes seconds to import.
    # This process needs the rest of its values too, if it runs the job: the data is read once.
    asked = OF_NETWORK if runs_in_this_process(settings) else OF_NETWORK[2:]
    by_network = "model" in (settings.cfg.data.get(key) for key in asked)
    settings = settings.with_pretraining_values() if by_network else settings
    if runs_in_this_process(settings):
        keep_freed_memory(settings.world.accelerator, is_sharded=settings.spec.is_sharded)

    data: DataSet | None = job.read_data(settings)
    if data is None or settings.loader is None:
        return settings.with_auto_resolved(None), None, None
    parts = splits(data, **{key: getattr(settings.loader, key) for key in SPLITTING})
    train, test = parts["train"], parts["test"]
    if job.trains:
        eval_batch_size = settings.loader.eval_batch_size or data.eval_batch_size or settings.loader.batch_size
        raise_problems(step_problems(settings, train.count, -(-test.count // eval_batch_size)))
    if data.notice and rank_of() == 0:
        warn(data.notice)
    if rank_of() == 0 and (left_out := data.data_info.get("left_out")):
        warn(f"left out of the data: {left_out}")
    settings = settings.with_auto_resolved(data, train.count if job.trains else None)
    if not runs_in_this_process(settings):  # each process reads its own copy
        data = None
        gc.collect()  # it may be part of a reference cycle; takes 0.26 s
    return settings, data, train.count


def runs_in_this_process(settings: Settings) -> bool:
    """Whether this process runs the job itself instead of starting other processes."""
    world = settings.world
    return world.external is not None or world.one_process


def start(job: Job, draft: Draft, overrides: list[str]) -> dict[str, Any]:
    """Runs `job` in the configured number of processes. Returns the result that it wrote.

    Before the config and the data are checked, nothing is written to the run folder, and torch is imported only to
    check the user's own classes and keys without a Validator.

    Raises:
        UserError: the config or the input is wrong.
        RunFailed: a different process failed and printed the reason.
        TrainingFailed: training failed for a known reason, such as out of memory.
    """
    project.make_importable()
    raise_problems(fixed_keys(overrides))
    kinds = ({} if job.trains else EVALUATE) | (PREDICT if job.name == "predict" else {})
    asked_for = (value_error(draft.tree, key, key, kind) for key, kind in kinds.items())
    raise_problems(filter(None, [*value_errors(draft, FIRST).values(), *asked_for]))
    # Use the values that were checked: `${now:%S}` would give a new name at each access. `run=0` is a name.
    first = {key: draft.get(key) for key in FIRST}
    named = {key: str(first[key]) for key in ("run", "resume", "init_from") if first[key] is not None}
    process.debug_rank = first["debug_rank"]  # belongs to this command, not to the run
    draft = draft.replace({**first, **named, "debug_rank": None})
    return (start_training if job.trains else start_evaluation)(job, draft, overrides)


def start_training(job: Job, draft: Draft, overrides: list[str]) -> "Report":
    from lockstep.launch import resuming

    draft = resuming.with_job_name(without_replaced_defaults(draft, overrides))
    again = draft.resume == "auto"
    draft = resuming.for_training(draft, overrides)
    experiment = next((o.partition("=")[2] for o in overrides if key_of(o) == "experiment"), None)
    checked = check(draft).with_run_identity(experiment)
    settings = replace(checked, overrides=resuming.all_overrides(draft, overrides))
    if rank_of() == 0:
        files.refuse_unwritable(settings.folder.path, "runs_dir")
    if not settings.cfg.resume:
        settings = resuming.new_run_settings(settings, again=again)
    cfg, world, folder = settings.cfg, settings.world, settings.folder
    classes = check_classes(settings, shipped=needs_signature_check(overrides))
    raise_problems([*classes, *debug_problems(world)])
    settings, data, samples = prepare_data(job, settings)
    from lockstep.reporting.report import Report

    if finished := resuming.finished_run(settings, samples):
        report = Report(finished)
        if world.rank == 0:
            done = f"{finished.path} is already finished after {pluralize(report['train/steps'], 'step')}"
            print(inline(f"{done}. To continue, raise the limit that ended it, such as trainer.max_epochs."))
        return report
    lock = folder.locked(RESTART_S if was_restarted() else PATIENCE_S) if world.rank == 0 else nullcontext()
    with lock:  # before any file is changed
        if again and not cfg.resume and world.rank == 0:
            if checkpoint_if_any(folder.path):  # saved since this command checked, by a run that has ended meanwhile
                raise UserError(f"{folder.path} was trained by a different command in the meantime. Rerun the command.")
            folder.discard()  # the run died before its first checkpoint
        execute(job, settings, data)
    return Report(folder)


def start_evaluation(job: Job, asked: Draft, overrides: list[str]) -> dict[str, Any]:
    from lockstep.launch import resuming

    draft = resuming.for_evaluation(asked, overrides, job.name)
    settings = check(draft, evaluating=True).with_run_identity()
    if job.request:
        request = Request(**{key: asked.get(key) for key in PREDICT})
        settings = job.request(settings, request, [*map(key_of, overrides)])
    raise_problems([*check_classes(settings, evaluating=True), *debug_problems(settings.world)])
    settings, data, _ = prepare_data(job, settings)
    path = settings.evaluation_file(job.name)
    before = path.stat().st_mtime_ns if path.exists() else None
    execute(job, settings, data)
    # the file may be on a different node's disk; on a read-only disk it is of an earlier evaluation
    is_new = path.exists() and path.stat().st_mtime_ns != before
    return dict(json.loads(files.read_text(path))) if is_new else {}


# --- Runs the job ---


def debug_problems(world: World) -> Iterator[str]:
    """Why `debug_rank` cannot have the terminal."""
    rank = process.debug_rank
    if rank is not None and (world.external or world.nodes > 1 or rank >= world.size):
        yield f"debug_rank={rank} is none of the processes that Lockstep starts on one machine; this run has {world.size}. Remove it."


def execute(job: Job, settings: Settings, data: "DataSet | None") -> None:
    """Runs the job in this process, with its data, or in new processes. Records failures, requeues pre-empted runs."""
    cfg, world, folder = settings.cfg, settings.world, settings.folder
    if world.accelerator == "cpu" and cfg.trainer.accelerator == "auto" and world.rank == 0 and (why := why_no_gpu()):
        warn(f"running on the CPU: {why}.")
    if process.debug_rank is not None and (cfg.loader or "num_workers" in cfg.data):  # workers have no terminal
        settings = settings.replace({f"{'loader' if cfg.loader else 'data'}.num_workers": 0})
    with process.recording_signals():
        try:
            if runs_in_this_process(settings):
                local.run_in_this_process(job, settings, data)
            else:
                local.run_processes(job.script, settings, trains=job.trains)
        except BaseException as e:
            if world.rank == 0 and job.trains:
                with suppress(UserError, OSError):  # a damaged report or a full disk; `e` matters more
                    folder.record_end(e)
            process.requeue(world.rank)
            raise
