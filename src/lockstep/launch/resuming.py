"""The config of a run that starts from an earlier one: resume=, init_from=, and run= or checkpoint= of eval.py and predict.py. Free of torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from lockstep.checkpoints import finding
from lockstep.checkpoints.finding import outline, step_of
from lockstep.config.checks import structure_problems
from lockstep.config.compose import compose_config, dotted, is_group, key_of
from lockstep.config.instantiate import is_a
from lockstep.config.project import command
from lockstep.config.rules import without_effect
from lockstep.config.schema import CLOSED, KEYS, PREDICT, RECIPES
from lockstep.config.settings import OF_NETWORK, Settings, folder_of, name_of_job, restarted
from lockstep.config.words import counted, plain, shown, warn
from lockstep.errors import UserError, raise_problems
from lockstep.run import RunFolder, find_run

# --- The keys that cannot change when a run is resumed ---

# Another network does not fit the checkpoint. Another split would validate on images that were trained on. Other batches would
# repeat some samples and skip others. The optimizer's state has its own learning rates. The bits depend on the `exact` keys.
FIXED = (
    "task._target_", "model._target_", "model.name", "seed", "optim", "exact.logical_ranks", "exact.threads",
    "data._target_", "data.val_fraction", "data.val_gap", "data.folds", "data.fold", "data.limit_train", "data.balance", "data.batch_size", "data.repeats",
)  # fmt: skip


# What a checkpoint's weights are, under any name.
AVERAGE = ("lockstep.callbacks.EMA", "lockstep.callbacks.weights.EMA")


def changes(cfg: DictConfig, saved: DictConfig) -> Iterator[str]:
    """Where the resumed run `cfg` differs from `saved` in what must stay."""

    def fixed(config: DictConfig) -> dict[str, Any]:
        nodes = {f"callbacks.{name}": node for name, node in config.callbacks.items()}
        averages = [key for key, node in nodes.items() if node._target_ in AVERAGE or is_a(node, key, AVERAGE[1])]
        return {
            key: value
            for at in (*FIXED, *averages)
            for key, value in dotted(plain(OmegaConf.select(config, at)), at).items()
        }

    now, then = fixed(cfg), fixed(saved)
    for key in {**now, **then}:
        if now.get(key) != then.get(key):
            kept = f"cannot be changed when resuming; the run has {then.get(key)}"
            yield f"{key}={now.get(key)} {kept}. Pass init_from=<run> for a new run."
    parts, before = (c.trainer.accumulate_grad_batches for c in (cfg, saved))
    for key in ("limit_train_batches", "val_check_interval"):  # integers count micro-batches
        if parts != before and isinstance(cfg.trainer[key], int):
            counts = f"in a run with trainer.{key}={cfg.trainer[key]}, which counts micro-batches; there it is {before}"
            yield f"trainer.accumulate_grad_batches={parts} cannot be changed {counts}. Set trainer.accumulate_grad_batches={before}."


# --- The config of a run that starts from an earlier one: `resume=`, `init_from=`, and `run=` or `checkpoint=` of eval.py and predict.py ---

MACHINE = ("strategy", "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.sync_batchnorm")
# Keys of these values are decided when the run first begins, then kept.
AUTO = {
    "trainer.precision": "auto", "trainer.log_every_n_steps": "auto", "data.num_workers": "auto", "seed": None,
    **{f"data.{key}": "model" for key in OF_NETWORK},
}  # fmt: skip
TRAINING = (  # keys without effect in an evaluation
    "augment", "data.repeats", "optim", "schedule", "callbacks", "logger", "checkpoint.", "resume", "init_from", "experiment", "debug",
    "seed", "trainer.accumulate_grad_batches", "trainer.limit_train_batches",
)  # fmt: skip


def is_absent(config: DictConfig, key: str) -> bool:
    group, _, name = key.rpartition(".")
    node = config[group] if group else config
    return OmegaConf.is_dict(node) and name not in node


def completed(saved: DictConfig) -> DictConfig:
    """The config of a run, with the defaults of keys that are newer than the run. Raises UserError: its groups have other values."""
    if newer := [key for key in KEYS if key.rpartition(".")[0] in ("", *CLOSED) and is_absent(saved, key)]:
        defaults = compose_config("train", [])
        with open_dict(saved):
            for key in newer:
                OmegaConf.update(saved, key, OmegaConf.select(defaults, key), force_add=True)
    raise_problems(structure_problems(saved))
    return saved


def merged(saved: DictConfig, composed: DictConfig, overrides: list[str]) -> DictConfig:
    """The run's own config with the changes of this command line."""
    cfg = saved.copy()
    keys = [key_of(override) for override in overrides]
    if recipes := [key for key in keys if key in RECIPES]:
        raise UserError(f"{recipes[0]}= cannot be changed for an existing run. Set the individual keys instead.")
    if "strategy" in keys:
        keys = [*MACHINE[:-1], *keys]
    with open_dict(cfg):
        for key in dict.fromkeys(keys):
            OmegaConf.update(cfg, key, OmegaConf.select(composed, key), force_add=True, merge=not is_group(key))
    return cfg


def for_training(composed: DictConfig, overrides: list[str]) -> DictConfig:
    """Resolves `resume` and `init_from` to checkpoint paths; a resumed run gets its own config back.

    Raises:
        UserError: there is nothing to continue, or the run directory is taken.
    """
    cfg = composed.copy()
    raise_problems(contradictions(cfg))
    if cfg.run is None and cfg.resume in (None, "auto"):
        cfg.run = name_of_job(cfg)
        if has_begun(cfg) and not cfg.resume and not restarted() and Settings.of(cfg).world.external is None:
            cfg.run = None  # a second command in the same SLURM job
    has_saved = continues_another(cfg) and finding.found_in(folder_of(cfg).path)
    if restarted() and cfg.run is not None and (not cfg.resume or has_saved) and cfg.trainer.enable_checkpointing:
        cfg.resume = "auto"  # the system restarted this command: continue in the same directory
    if cfg.resume:
        return resumed(cfg, overrides)
    # only rank 0 checks that a directory is free: a later rank may find the one that rank 0 has made
    if Settings.of(cfg).world.rank == 0 and has_begun(cfg):
        place = f"run={cfg.run}: {cfg.runs_dir}/{cfg.run} exists"
        raise UserError(f"{place}. Pass resume=auto to continue it, or another name.")
    return from_weights(cfg)


def contradictions(cfg: DictConfig) -> Iterator[str]:
    if cfg.init_from and cfg.resume not in (None, "auto"):
        yield (
            f"resume={cfg.resume} and init_from exclude each other: continue a run, or start a new one from weights. "
            "Pass resume=auto to start run=<name> from weights, and to continue it once it has begun."
        )
    if cfg.resume == "auto" and not cfg.trainer.enable_checkpointing:
        yield "resume=auto has no effect with trainer.enable_checkpointing=false. Remove one of them."


def has_begun(cfg: DictConfig) -> bool:
    return cfg.run is not None and folder_of(cfg).has_config()


def continues_another(cfg: DictConfig) -> bool:
    """Whether a start of this command may have begun the run as the continuation of another one."""
    return cfg.run is not None and bool(folder_of(cfg).report().get("resumed_from"))


def from_weights(cfg: DictConfig) -> DictConfig:
    """The config of a new run, with `init_from` as the path of a checkpoint."""
    if cfg.init_from:
        cfg.init_from = str(outline(finding.tested_checkpoint(str(cfg.init_from), "init_from", cfg.runs_dir)).path)
    return cfg


def resumed(cfg: DictConfig, overrides: list[str]) -> DictConfig:
    place, checkpoint = finding.resume_point(str(cfg.resume), cfg.run, cfg.runs_dir)
    before = RunFolder(place)
    if checkpoint is None:
        earlier = before.report()
        origin = earlier.get("resumed_from")
        if origin or earlier.get("status") == "done":
            why = f"it continued {origin}" if origin else "it is done"
            raise UserError(
                f"{place} has no checkpoint, so resume=auto would train it from the start, although {why}. Put its checkpoints back, or rerun the first command with a different run=<name>."
            )
        if before.has_config() and Settings.of(cfg).world.rank == 0:
            warn(f"{place} has no checkpoint yet: training starts from step 0.")
        cfg.resume = None
        return same_identity(from_weights(cfg), before)
    before.validate()
    saved, place, runs_dir = completed(before.config()), place.resolve(), Path(cfg.runs_dir).resolve()
    own = [o for o in overrides if key_of(o) not in ("resume", "run", "runs_dir")]
    # With a recipe on the command line, that is the whole config again; otherwise keys that were not passed stay as they were.
    recipe = cfg.resume == "auto" and any(key_of(o) in RECIPES for o in own)
    result = cfg.copy() if recipe else merged(saved, cfg, own)
    inside = place.is_relative_to(runs_dir)  # the run may have been moved there
    own_name = str(place.relative_to(runs_dir) if inside else saved.run)
    with open_dict(result):
        take_decided(result, saved)
        result.run, result.runs_dir = str(cfg.run or own_name), cfg.runs_dir
        result.resume, result.init_from = str(checkpoint.path), saved.init_from  # init_from is for the record
    set_aside(result, own)
    again = restarted() and continues_another(result)
    if Settings.of(result).world.rank == 0 and result.run != own_name and has_begun(result) and not again:
        raise UserError(f"run={result.run}: {folder_of(result).path} is another run. Remove run, or pass another name.")
    raise_problems(changes(result, saved))
    return same_identity(result, before) if result.run == own_name else result


def take_decided(new: DictConfig, saved: DictConfig) -> None:
    """Replaces what was decided when the run first began by its values then."""
    for key, undecided in AUTO.items():
        if OmegaConf.select(new, key) != undecided:
            continue
        if is_absent(saved, key):  # of an older version, which has the default of the class
            del new.data[key.removeprefix("data.")]
        else:
            OmegaConf.update(new, key, OmegaConf.select(saved, key))


def set_aside(cfg: DictConfig, overrides: list[str]) -> None:
    """Neutralises recalled values that have no effect under the new strategy or device, with a warning. Those passed now stay an error."""
    settings, passed = Settings.of(cfg), [key_of(override) for override in overrides]
    for key in (key for key in without_effect(settings) if key not in passed):
        value = OmegaConf.select(cfg, key)
        if settings.world.rank == 0:
            warn(f"{key}={shown(value)} of the resumed run has no effect here and is set aside")
        OmegaConf.update(cfg, key, False if value is True else None, force_add=True)


def same_identity(cfg: DictConfig, before: RunFolder) -> DictConfig:
    """Keeps what was drawn when the run first began: its seed and its loggers' ids."""
    if not before.has_config():
        return cfg
    saved = before.config()
    with open_dict(cfg):
        cfg.seed = saved.seed if cfg.seed is None else cfg.seed
        for name, logger in saved.logger.items():
            if "id" in logger and name in cfg.logger:
                cfg.logger[name].id = logger.id
    return cfg


def for_evaluation(composed: DictConfig, overrides: list[str], job: str = "eval") -> DictConfig:
    """The config of the run that `job` (eval or predict) is about, with the strategy and devices of this command line.

    Raises:
        UserError: the run or the checkpoint does not exist, is damaged, or is something else.
    """
    if (composed.run is None) == (composed.checkpoint is None):
        typed, more = command(job), " input=<folder>" if job == "predict" else ""
        raise UserError(f"Run {typed} run=<name>{more}, or {typed} checkpoint=<path>{more}; one of the two.")
    if composed.run is not None:
        folder = find_run(str(composed.run), composed.runs_dir, key="run")
        checkpoint = outline(finding.checkpoint_of_report(folder.path))
    else:
        checkpoint = outline(finding.complete_checkpoint(Path(str(composed.checkpoint)), "checkpoint"))
        folder = RunFolder(checkpoint.path.resolve().parent.parent)
    # a checkpoint that was moved out of its run directory has the config as well
    saved = completed(folder.config() if folder.has_config() else OmegaConf.create(checkpoint.config))
    if folder.has_config():
        folder.refuse_links()
    predicts = job == "predict"
    what = ("run", "runs_dir", "checkpoint", "debug_rank", *(PREDICT if predicts else ()))  # the command's own keys
    own = [o for o in overrides if key_of(o) not in what]
    if idle := [o for o in own if key_of(o).startswith((*TRAINING, *(("trainer.limit_",) if predicts else ())))]:
        raise UserError(f"{idle[0]} has no effect in {'a prediction' if predicts else 'an evaluation'}. Remove it.")
    cfg = merged(saved, composed, [*own, *MACHINE])
    with open_dict(cfg):
        cfg.run = str(saved.run if composed.run is None else composed.run)
        cfg.runs_dir = composed.runs_dir if composed.run is not None else home_of(checkpoint.path, cfg.run)
        cfg.resume, cfg.init_from, cfg.checkpoint.sharded = None, str(checkpoint.path), False
        cfg.callbacks, cfg.augment, cfg.trainer.accumulate_grad_batches = {}, {}, 1
        cfg.trainer.limit_train_batches = 0
        take_decided(cfg, saved)
    return cfg


def home_of(checkpoint: Path, run: str) -> str:
    """runs_dir of the run with the name `run` that has this checkpoint. Of one that was moved out of it, where no folder is: its config
    may name any run."""
    folder, name = checkpoint.resolve().parent.parent, Path(run).parts
    inside = folder.parts[-len(name) :] == name and RunFolder(folder).has_config()
    return str(Path(*folder.parts[: -len(name)]) if inside else checkpoint)


# --- A finished run that is started again, with nothing left to train ---

PLACE = ("run", "runs_dir", "resume", "init_from", *MACHINE)  # keys that change nothing of the training


def already_finished(settings: Settings, samples: int | None) -> str | None:
    """What to report if the run of the checkpoint `cfg.resume` is done and `cfg` trains no further; None if it does.

    `samples` are those of an epoch; None if they are not known. Early stopping and max_time may end a run before its last step, so a
    config that trains alike has nothing left either.
    """
    cfg, plan = settings.cfg, settings.steps
    if not cfg.resume:
        return None
    folder = RunFolder(Path(cfg.resume).resolve().parent.parent)
    report = folder.report()
    if report.get("status") != "done" or report.get("train/steps") is None:  # which are written last
        return None
    newest = next(finding.checkpoints(folder.path), None)
    if newest is None or step_of(Path(cfg.resume)) < step_of(newest):
        return None
    steps = int(report["train/steps"])
    longer = []  # the keys that end the run after these steps, each with a larger value
    per_epoch = plan.epoch(samples) // plan.accumulate if samples else None
    if plan.epochs * (per_epoch or 0) <= steps:
        longer.append(f"trainer.max_epochs={steps // per_epoch + 1 if per_epoch else int(plan.epochs) + 1}")
    if 0 < cfg.trainer.max_steps <= steps:
        longer.append(f"trainer.max_steps={2 * steps}")
    reached = bool(longer and per_epoch)
    now, then = (dotted(plain(config)) for config in (cfg, folder.config()))
    if not reached and any(now.get(key) != then.get(key) for key in {**now, **then} if not key.startswith(PLACE)):
        return None
    early = ["trainer.max_time=<longer>"] if cfg.trainer.max_time else []
    early += [f"callbacks.{name}.patience=<more>" for name, node in cfg.callbacks.items() if "patience" in node]
    keys = " ".join(longer if reached else early or longer)
    return (
        f"{report.get('run', folder.path.name)} is already finished: {f'{steps:,} of ' if reached else ''}{counted(steps, 'step')}"
        f"{f'; set {keys} to continue' if keys else ''}. Nothing was changed."
    )
