"""Configs that start from an earlier run: `resume`, `init_from`, evaluation and prediction. Free of torch."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.checkpoints import finding
from lockstep.checkpoints.finding import Checkpoint, read_outline, step_of
from lockstep.config.compose import compose_config, dotted, is_group, key_of, recorded_overrides
from lockstep.config.draft import Draft, name_of_job, structure_problems, values_of, was_restarted
from lockstep.config.formatting import plain, to_text, warn
from lockstep.config.instantiate import has_base
from lockstep.config.rules import keys_without_effect
from lockstep.config.run_config import CLOSED, Component, RunConfig
from lockstep.config.schema import KEYS, PREDICT, RECIPES
from lockstep.config.settings import OF_NETWORK, Settings
from lockstep.errors import UserError, raise_problems
from lockstep.machine.world import external_launcher, number_from_env, rank_of
from lockstep.run import RunFolder, find_run, overrides_of

# --- The keys that cannot change when a run is resumed ---

# A different network does not fit the checkpoint. A different split would validate on training images. Different
# batches would repeat some samples and skip others. The optimizer's state contains the learning rates. The bits of the
# result depend on the `exact` keys.
FIXED = (
    "task._target_", "model._target_", "model.name", "seed", "optim", "exact.logical_ranks", "exact.threads", "data._target_",
    "loader.val_fraction", "loader.val_gap", "loader.folds", "loader.fold", "loader.limit_train", "loader.balance", "loader.batch_size",
    "loader.repeats",
)  # fmt: skip

MICRO_BATCHES = ("trainer.limit_train_batches", "trainer.val_check_interval")  # if they are integers, they count these
# Callbacks that determine a checkpoint's weights, under any name.
AVERAGE = ("lockstep.callbacks.EMA", "lockstep.callbacks.weights.EMA")


def resume_errors(now: Draft, then: Draft) -> Iterator[str]:
    """Errors for the keys that cannot change when a run is resumed."""

    def fixed_values(draft: Draft) -> dict[str, Any]:
        callbacks = {f"callbacks.{name}": Component.of(node) for name, node in draft.get("callbacks").items()}
        groups = [*FIXED, *(k for k, v in callbacks.items() if v.target in AVERAGE or has_base(v, k, AVERAGE[1]))]
        if any(isinstance(now.get(key), int) for key in MICRO_BATCHES):
            groups.append("trainer.accumulate_grad_batches")
        return {key: value for group in groups for key, value in dotted(draft.get(group), group).items()}

    new, saved = fixed_values(now), fixed_values(then)
    for key in {**new, **saved}:
        if new.get(key) != saved.get(key):
            reason = f"cannot be changed when resuming; the run has {saved.get(key)}"
            yield f"{key}={new.get(key)} {reason}. Pass init_from=<run> to start a new run."


# --- Configs that start from an earlier run: `resume`, `init_from`; `run` or `checkpoint` of eval.py and predict.py ---

MACHINE = ("strategy", "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.sync_batchnorm")
# Keys with these values are decided at the first start of the run, then kept.
AUTO = {
    "trainer.precision": "auto", "trainer.log_every_n_steps": "auto", "loader.num_workers": "auto", "loader.eval_batch_size": None,
    **{f"data.{key}": "model" for key in OF_NETWORK},
}  # fmt: skip
TRAINING = (  # keys without effect in an evaluation
    "augment", "loader.repeats", "optim", "schedule", "callbacks", "logger", "checkpoint.", "resume", "init_from", "experiment", "debug",
    "seed", "trainer.accumulate_grad_batches", "trainer.limit_train_batches",
)  # fmt: skip
NO_TRAINING: dict[str, Any] = {
    "resume": None, "checkpoint.sharded": False, "callbacks": {}, "augment": {}, "trainer.accumulate_grad_batches": 1,
    "trainer.limit_train_batches": 0,
}  # fmt: skip


def with_new_defaults(saved: Draft) -> Draft:
    """The config of a run, with defaults for keys that are newer than the run. Raises UserError if it is malformed."""
    groups = [group for group in ("", *CLOSED) if not group or isinstance(saved.tree.get(group), Mapping)]
    if newer := [key for key in KEYS if key.rpartition(".")[0] in groups and not saved.has(key)]:
        defaults = Draft(compose_config("train", []))
        saved = saved.replace({key: defaults.get(key) for key in newer})
    raise_problems(structure_problems(saved))
    return saved


def config_of(checkpoint: Checkpoint) -> RunConfig:
    """The config of the run that saved a checkpoint. Raises UserError if it is damaged."""
    return values_of(with_new_defaults(Draft.of_values(checkpoint.config)))


def merge_saved(saved: Draft, composed: Draft, overrides: list[str]) -> Draft:
    """The saved config of the run with the changes of this command line."""
    keys = [key_of(override) for override in overrides]
    removed = [key_of(override) for override in overrides if override.startswith("~")]
    if recipes := [key for key in keys if key in RECIPES]:
        raise UserError(f"{recipes[0]}= cannot be changed for an existing run. Set the individual keys instead.")
    if "strategy" in keys:
        keys = [*MACHINE[:-1], *keys]
    new = {key: composed.node(key) for key in keys if key not in removed}
    return saved.replace(new, merge=[key for key in new if not is_group(key)], without=filter(saved.has, removed))


def with_job_name(draft: Draft) -> Draft:
    """Adds the name of the job, if there is one, and resume=auto if the system restarted this command."""
    if draft.run is None and draft.resume in (None, "auto"):
        name = name_of_job(draft.model_and_data)
        # a second command in the same SLURM job starts a new run
        with_name = draft.replace({"run": name})
        is_alone = external_launcher(os.environ) is None
        has_begun = name is not None and with_name.folder.has_config()
        if not (has_begun and not draft.resume and not was_restarted() and is_alone):
            draft = with_name
    if was_restarted() and draft.run is not None and draft.get("trainer.enable_checkpointing"):
        # an earlier start of this command may have begun this run as the continuation of a different one
        has_saved = draft.folder.report().get("resumed_from") and finding.checkpoint_paths(draft.folder.path)
        return draft.replace({"resume": "auto"}) if has_saved or not draft.resume else draft
    return draft


def for_training(draft: Draft, overrides: list[str]) -> Draft:
    """Resolves `resume` and `init_from` to checkpoint paths. A resumed run gets its saved config back.

    Raises:
        UserError: there is nothing to continue, or the run folder is in use.
    """
    if draft.get("init_from") and draft.resume not in (None, "auto"):
        reason = f"resume={draft.resume} and init_from are mutually exclusive"
        raise UserError(f"{reason}. Pass resume=auto to start from weights, or to continue if the run has begun.")
    if draft.resume == "auto" and not draft.get("trainer.enable_checkpointing"):
        raise UserError("resume=auto has no effect with trainer.enable_checkpointing=false. Remove one of them.")
    return resume_draft(draft, overrides) if draft.resume else draft


def is_first() -> bool:
    """Whether this is the first process. Only it checks the folder: the others may already see files of the first."""
    by_launcher = external_launcher(os.environ) is not None
    return rank_of() == 0 and (by_launcher or number_from_env(os.environ, "NODE_RANK", default=0) == 0)


def new_run_settings(settings: Settings, *, again: bool) -> Settings:
    """The settings of a new run, with `init_from` as the path of a checkpoint.

    Raises:
        UserError: there are no such weights, or the run's folder exists and this command does not run `again`.
    """
    cfg = settings.cfg
    if is_first() and not again and settings.folder.has_config():
        reason = f"run={cfg.run}: {cfg.runs_dir}/{cfg.run} already exists"
        raise UserError(f"{reason}. Pass resume=auto to continue it, or a different name.")
    if cfg.init_from is None:
        return settings
    checkpoint = read_outline(finding.tested_checkpoint(cfg.init_from, "init_from", cfg.runs_dir)).path
    return settings.replace({"init_from": str(checkpoint)})


def resume_draft(draft: Draft, overrides: list[str]) -> Draft:
    folder, checkpoint = finding.resume_point(str(draft.resume), draft.run, draft.runs_dir)
    previous = RunFolder(folder)
    if checkpoint is None:
        report = previous.report()
        if report.get("resumed_from") or report.get("status") == "done":
            reason = f"{folder} has no checkpoint, but it is done or continued a different run"
            raise UserError(f"{reason}. Restore its checkpoints, or rerun the first command with run=<new name>.")
        draft = draft.replace({"resume": None})
        if not previous.has_config():
            return draft
        if is_first():
            warn(f"{folder} has no checkpoint yet: training starts from step 0.")
        return restore_auto_values(draft, Draft.of_run(previous), {})
    saved = with_new_defaults(Draft.of_run(previous))
    folder, runs_dir = folder.resolve(), Path(draft.runs_dir).resolve()
    new_overrides = [o for o in overrides if key_of(o) not in ("resume", "run", "runs_dir")]
    # A recipe on the command line defines the whole config. Otherwise, keys that are not passed keep saved values.
    recipe = draft.resume == "auto" and any(key_of(o) in RECIPES for o in new_overrides)
    inside = folder.is_relative_to(runs_dir)  # the run may have been moved there
    previous_name = str(folder.relative_to(runs_dir) if inside else saved.run)
    result = draft if recipe else merge_saved(saved, draft, new_overrides)
    result = restore_auto_values(result, saved, with_ids=str(draft.run or previous_name) == previous_name)
    place = {"run": str(draft.run or previous_name), "runs_dir": draft.runs_dir, "resume": str(checkpoint.path)}
    result = result.replace({**place, "init_from": saved.get("init_from")})  # for the record
    result = drop_ineffective_keys(result, new_overrides)
    is_restart = was_restarted() and result.folder.report().get("resumed_from")
    if is_first() and result.run != previous_name and result.folder.has_config() and not is_restart:
        reason = f"run={result.run}: {result.folder.path} is a different run"
        raise UserError(f"{reason}. Remove run, or pass a different name.")
    raise_problems(resume_errors(result, saved))
    return result


def all_overrides(draft: Draft, overrides: Sequence[str]) -> tuple[str, ...] | None:
    """The overrides of the run that this one continues and of this command; None if that run has not saved any."""
    if not draft.resume or any(key_of(o) in RECIPES for o in overrides):
        return recorded_overrides(overrides)
    previous = overrides_of(RunFolder(Path(draft.resume).resolve().parent.parent).report())
    return None if previous is None else recorded_overrides(overrides, previous)


def restore_auto_values(new: Draft, saved: Draft, auto: Mapping[str, Any] = AUTO, *, with_ids: bool = True) -> Draft:
    """Restores what was decided at the first start of the run: the values of `auto`, the seed and the loggers' ids."""
    ids = {f"logger.{name}.id": None for name in saved.group("logger")} if with_ids else {}
    undecided = {**auto, "seed": None, **ids}
    keys = [key for key, value in undecided.items() if new.has(key) and new.get(key) == value and saved.has(key)]
    return new.replace({key: saved.get(key) for key in keys})


def drop_ineffective_keys(draft: Draft, overrides: list[str]) -> Draft:
    """Drops saved values without effect under the new strategy or device, with a warning. Passed ones stay an error."""
    passed = [key_of(override) for override in overrides]
    try:
        idle = keys_without_effect(Settings.of(values_of(draft)))
    except UserError:  # the check of the whole config reports it
        return draft
    values = {key: draft.get(key) for key in idle if key not in passed}
    for key, value in values.items():
        if is_first():
            warn(f"{key}={to_text(value)} of the resumed run has no effect here and is ignored")
    return draft.replace({key: False if value is True else None for key, value in values.items()})


def for_evaluation(composed: Draft, overrides: list[str], job: str = "eval") -> Draft:
    """The config of the run that `job` (eval or predict) uses, with the strategy and devices of this command line.

    Raises:
        UserError: the run or the checkpoint does not exist, is damaged, or is a different kind of file.
    """
    path = composed.get("checkpoint")
    if (composed.run is None) == (path is None):
        raise UserError("Pass either run=<name> or checkpoint=<path>.")
    if composed.run is not None:
        folder = find_run(str(composed.run), composed.runs_dir, key="run")
        checkpoint = read_outline(finding.checkpoint_of_report(folder.path))
    else:
        checkpoint = read_outline(finding.complete_checkpoint(Path(str(path)), "checkpoint"))
        folder = RunFolder(checkpoint.path.resolve().parent.parent)
    # a checkpoint that was moved out of its run folder contains the config too
    saved = with_new_defaults(Draft.of_run(folder) if folder.has_config() else Draft.of_values(checkpoint.config))
    if folder.has_config():
        folder.refuse_links()
    predicts = job == "predict"
    job_keys = ("run", "runs_dir", "checkpoint", "debug_rank", *(PREDICT if predicts else ()))  # not those of the run
    rest = [o for o in overrides if key_of(o) not in job_keys]
    if idle := [o for o in rest if key_of(o).startswith((*TRAINING, *(("trainer.limit_",) if predicts else ())))]:
        raise UserError(f"{idle[0]} has no effect in {'a prediction' if predicts else 'an evaluation'}. Remove it.")
    run = str(saved.run if composed.run is None else composed.run)
    runs_dir = composed.runs_dir if composed.run is not None else runs_dir_of(checkpoint.path, run)
    place = {"run": run, "runs_dir": runs_dir, "init_from": str(checkpoint.path)}
    result = merge_saved(saved, composed, [*rest, *MACHINE]).replace({**NO_TRAINING, **place})
    return restore_auto_values(result, saved)


def runs_dir_of(checkpoint: Path, run: str) -> str:
    """The runs_dir of the run `run` that contains this checkpoint.

    For a checkpoint outside of its run folder, the checkpoint's own path, which is not a folder: its config may name any
    run.
    """
    folder, name = checkpoint.resolve().parent.parent, Path(run).parts
    inside = folder.parts[-len(name) :] == name and RunFolder(folder).has_config()
    return str(Path(*folder.parts[: -len(name)]) if inside else checkpoint)


# --- A finished run with nothing left to train ---

PLACE = ("run", "runs_dir", "resume", "init_from", *MACHINE)  # keys that do not change the training


def finished_run(settings: Settings, samples: int | None) -> RunFolder | None:
    """The run of the checkpoint `cfg.resume` if it is done and `cfg` trains no further.

    `samples`: the number of samples per epoch; None if unknown. Early stopping and max_time may end a run before its
    last step, so an unchanged training config also has nothing left to train.
    """
    cfg = settings.cfg
    if not cfg.resume:
        return None
    folder = RunFolder(Path(cfg.resume).resolve().parent.parent)
    report = folder.report()
    steps = report.get("train/steps")
    if report.get("status") != "done" or steps is None:  # these are written last
        return None
    newest = next(finding.checkpoints(folder.path), None)
    if newest is None or step_of(Path(cfg.resume)) < step_of(newest):
        return None
    if samples and settings.total_steps(samples) <= steps:
        return folder
    saved = plain(with_new_defaults(Draft.of_run(folder)).tree)
    # A config without a loader does not use the saved loader keys.
    new, old = dotted(cfg.values), dotted(saved if cfg.loader else saved | {"loader": {}})
    changed = (key for key in {**new, **old} if new.get(key) != old.get(key))
    return folder if all(key.startswith(PLACE) for key in changed) else None
