"""Starting from what an earlier run left: `resume=`, `init_from=`, and `run=` or `checkpoint=` of eval.py."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from lockstep.checkpoints.finding import best, checkpoints, find_run, newest, tested_checkpoint, whole
from lockstep.config.compose import is_group, key_of
from lockstep.config.identity import name_of_job, restarted
from lockstep.errors import UserError, raise_problems
from lockstep.machine.world import world_of

MACHINE = ("strategy", "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.sync_batchnorm")
# A resumed run cannot change these: another network does not fit the checkpoint, another split would validate on images
# that were trained on, other batches would repeat samples and leave out others, and the optimizer's state has its own rates.
FIXED = (
    "task._target_",
    "model._target_",
    "model.name",
    "data._target_",
    "data.val_fraction",
    "data.limit_train",
    "data.batch_size",
    "seed",
    "optim",
    "callbacks.ema",
)
AUTO = ("trainer.precision", "data.num_workers")  # decided when the run first began, and kept
TRAINING = (
    "optim",
    "schedule",
    "callbacks",
    "logger",
    "checkpoint.",
    "resume",
    "init_from",
    "experiment",
    "debug",
    "seed",
    "trainer.accumulate_grad_batches",
)
RECIPES = ("experiment", "debug")  # they set keys of many groups
EVAL_OWN = ("run", "runs_dir", "checkpoint")  # keys of eval.py that say what to evaluate


def merged(saved: DictConfig, composed: DictConfig, overrides: list[str]) -> DictConfig:
    """The run's own config with what this command line changes."""
    cfg = saved.copy()
    keys = [key_of(override) for override in overrides]
    fixed = [key for key in keys if key in RECIPES]
    if fixed:
        raise UserError(f"{fixed[0]}= cannot be changed for a run that exists. Set the keys that you mean.")
    if "strategy" in keys:
        keys = [*MACHINE[:-1], *keys]
    with open_dict(cfg):
        for key in dict.fromkeys(keys):
            OmegaConf.update(cfg, key, OmegaConf.select(composed, key), force_add=True, merge=not is_group(key))
    return cfg


def load_config(path: Path) -> DictConfig:
    cfg = OmegaConf.load(path)
    assert isinstance(cfg, DictConfig)
    return cfg


def for_training(composed: DictConfig, overrides: list[str]) -> DictConfig:
    """Resolves `resume` and `init_from` to paths of checkpoints; a resumed run gets its own config back.

    Raises:
        UserError: what is to be continued does not exist, or the run's directory is taken.
    """
    cfg = composed.copy()
    if cfg.init_from and cfg.resume not in (None, "auto"):
        raise UserError(
            f"resume={cfg.resume} and init_from exclude each other: continue a run, or start a new one from weights. "
            "Type resume=auto to start run=<name> from weights, and to continue it once it has begun."
        )
    if cfg.run is None and cfg.resume in (None, "auto"):
        cfg.run = name_of_job(cfg)
        again = cfg.run is not None and (Path(cfg.runs_dir) / cfg.run / "config.yaml").exists()
        if again and not cfg.resume and not restarted() and world_of(cfg).external is None:
            cfg.run = None  # the second command of one job of SLURM
    if restarted() and cfg.run is not None and not cfg.resume and cfg.trainer.enable_checkpointing:
        cfg.resume = "auto"  # the system has started the same command again: it goes on, in its own directory
    if cfg.resume:
        return resumed(cfg, overrides)
    first = world_of(cfg).rank == 0  # a later rank may find the directory that rank 0 has made
    if first and cfg.run and (Path(cfg.runs_dir) / str(cfg.run) / "config.yaml").exists():
        raise UserError(
            f"run={cfg.run}: {cfg.runs_dir}/{cfg.run} exists. Type resume=auto to continue it, or another name."
        )
    return from_weights(cfg)


def from_weights(cfg: DictConfig) -> DictConfig:
    """The config of a run that begins, with `init_from` as the path of a checkpoint."""
    if cfg.init_from:
        cfg.init_from = str(tested_checkpoint(cfg.init_from, "init_from", cfg.runs_dir))
    return cfg


def resumed(cfg: DictConfig, overrides: list[str]) -> DictConfig:
    if cfg.resume == "auto":
        if not cfg.run:
            raise UserError("resume=auto continues the run in runs/<run>. Type run=<name> as well.")
        run_dir = Path(cfg.runs_dir) / str(cfg.run)
        found = next(checkpoints(run_dir), None)
        if found is None:
            cfg.resume = None
            return same_identity(from_weights(cfg), run_dir / "config.yaml")
        checkpoint = found
    elif (Path(cfg.resume) / "config.yaml").is_file():
        run_dir = Path(cfg.resume)
        checkpoint = newest(run_dir, "resume")
    elif ".ckpt" in Path(cfg.resume).suffixes or Path(cfg.resume).is_file():
        checkpoint = whole(Path(cfg.resume), "resume")
        run_dir = checkpoint.resolve().parents[1]
        if not (run_dir / "config.yaml").is_file():
            raise UserError(
                f"resume={cfg.resume} lies outside of a run directory. Type init_from={cfg.resume} to start a new run from its weights."
            )
    else:
        run_dir = find_run(cfg.runs_dir, cfg.resume, "resume")
        checkpoint = newest(run_dir, "resume")
    saved = load_config(run_dir / "config.yaml")
    own = [o for o in overrides if key_of(o) not in ("resume", "run", "runs_dir")]
    # A recipe typed again is the whole config again; otherwise what is not typed stays as it was.
    recipe = cfg.resume == "auto" and any(key_of(o) in RECIPES for o in own)
    result = cfg.copy() if recipe else merged(saved, cfg, own)
    with open_dict(result):
        for key in AUTO:
            if OmegaConf.select(result, key) == "auto":
                OmegaConf.update(result, key, OmegaConf.select(saved, key))
        inside = run_dir.resolve().is_relative_to(Path(cfg.runs_dir).resolve())  # and it may have been moved there
        own_name = str(run_dir.resolve().relative_to(Path(cfg.runs_dir).resolve())) if inside else str(saved.run)
        result.run = str(cfg.run or own_name)
        result.runs_dir = cfg.runs_dir
        result.resume, result.init_from = str(checkpoint), saved.init_from  # the latter for the record
        first = world_of(result).rank == 0  # a later rank may find the directory that rank 0 has made
        if first and result.run != own_name and (Path(cfg.runs_dir) / result.run / "config.yaml").exists():
            raise UserError(
                f"run={result.run}: {cfg.runs_dir}/{result.run} is another run. Leave run out, or type another name."
            )
        result.seed = saved.seed if result.seed is None else result.seed  # drawn once
        refuse_changes(result, saved)
    return same_identity(result, run_dir / "config.yaml") if result.run == own_name else result


def same_identity(cfg: DictConfig, before: Path) -> DictConfig:
    """What was drawn when the run first began stays: its seed and its id at W&B."""
    if not before.is_file():
        return cfg
    saved = load_config(before)
    with open_dict(cfg):
        cfg.seed = saved.seed if cfg.seed is None else cfg.seed
        if "wandb" in cfg.logger and "wandb" in saved.logger:
            cfg.logger.wandb.id = saved.logger.wandb.id
    return cfg


def config_inside(checkpoint: Path) -> DictConfig:
    """The config that every checkpoint carries, for one that was moved out of its run's directory."""
    import torch  # 3 s; only here is it needed before a run starts

    file = checkpoint / "rest.pt" if checkpoint.is_dir() else checkpoint
    cfg = OmegaConf.create(torch.load(file, map_location="cpu", weights_only=True, mmap=True)["config"])
    assert isinstance(cfg, DictConfig)
    return cfg


def leaves(cfg: DictConfig, key: str) -> dict[str, Any]:
    """The values at and below `key`, by their own keys."""
    value: Any = OmegaConf.select(cfg, key)
    if isinstance(value, DictConfig):
        return {k: v for name in map(str, value) for k, v in leaves(cfg, f"{key}.{name}").items()}
    return {key: OmegaConf.to_container(value) if isinstance(value, ListConfig) else value}


def refuse_changes(cfg: DictConfig, saved: DictConfig) -> None:
    """Raises UserError for values of FIXED that differ from those of the run that is to go on."""
    problems = []
    for fixed in FIXED:
        now, then = leaves(cfg, fixed), leaves(saved, fixed)
        for key in {**now, **then}:
            if now.get(key) != then.get(key):
                problems.append(
                    f"{key}={now.get(key)} cannot be changed in a run that is resumed; there it is {then.get(key)}. Type init_from=<run> for a new run."
                )
    now, then = (c.trainer.accumulate_grad_batches for c in (cfg, saved))
    for key in ("limit_train_batches", "val_check_interval"):
        if now != then and isinstance(cfg.trainer[key], int):
            problems.append(
                f"trainer.accumulate_grad_batches={now} cannot be changed in a run with trainer.{key}={cfg.trainer[key]}, which counts "
                f"micro-batches; there it is {then}. Type trainer.accumulate_grad_batches={then}."
            )
    raise_problems(problems)


def for_evaluation(composed: DictConfig, overrides: list[str]) -> DictConfig:
    """The evaluated run's config, with the strategy and devices of this command line.

    Raises:
        UserError: the run or the checkpoint does not exist or is damaged.
    """
    if (composed.run is None) == (composed.checkpoint is None):
        raise UserError("Type python eval.py run=<name>, or python eval.py checkpoint=<path>; one of the two.")
    if composed.run is not None:
        run_dir = find_run(composed.runs_dir, str(composed.run), "run")
        checkpoint = best(run_dir)
    else:
        checkpoint = whole(Path(composed.checkpoint), "checkpoint")
        run_dir = checkpoint.resolve().parents[1]
    config = run_dir / "config.yaml"
    saved = load_config(config) if config.is_file() else config_inside(checkpoint)
    own = [o for o in overrides if key_of(o) not in EVAL_OWN]
    idle = [o for o in own if key_of(o).startswith(TRAINING)]
    if idle:
        raise UserError(f"{idle[0]} has no effect in an evaluation. Leave it out.")
    cfg = merged(saved, composed, [*own, *MACHINE])
    with open_dict(cfg):
        cfg.runs_dir = composed.runs_dir if composed.run is not None else str(run_dir.parent)
        cfg.run = str(saved.run if composed.run is None else composed.run)
        cfg.resume, cfg.init_from, cfg.checkpoint.sharded = None, str(checkpoint), False
        cfg.callbacks, cfg.trainer.accumulate_grad_batches = {}, 1
    return cfg
