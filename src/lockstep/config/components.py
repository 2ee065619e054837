"""Checks that apply to Lockstep's own tasks and data only. Free of torch."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from lockstep.config.identity import title
from lockstep.config.schema import GROUPS


def of_lockstep(node: DictConfig) -> bool:
    """Whether a node names one of Lockstep's classes, whose needs are known without importing it."""
    return str(node.get("_target_")).startswith("lockstep.")


def missing_targets(cfg: DictConfig) -> Iterator[str]:
    for group in GROUPS:
        if isinstance(cfg.get(group), DictConfig) and OmegaConf.is_missing(cfg[group], "_target_"):
            yield f"{group}._target_ is missing; it names your class, for example {group}._target_=my_package.my_module.MyClass."


def task_problems(cfg: DictConfig, _: object) -> Iterator[str]:
    """Checks Lockstep's own tasks; build.py checks other tasks, once their class is imported."""
    if not of_lockstep(cfg.task):
        return
    yield from missing_groups(cfg)
    if not str(cfg.checkpoint.monitor).startswith("val/"):
        yield f"checkpoint.monitor={cfg.checkpoint.monitor or 'null'} is not possible; it takes a validation figure, val/<name>. Type for example checkpoint.monitor=val/loss."


def missing_groups(cfg: DictConfig) -> Iterator[str]:
    """Groups that every Task needs but that are `none`."""
    for group, usual in {"model": "basic_net", "optim": "adamw", "schedule": "constant"}.items():
        if not cfg[group]:
            yield f"{group}=none is for a LightningModule with its own {group}; task={title(cfg.task)} needs one. Type {group}={usual}."


def own_loader_problems(cfg: DictConfig) -> Iterator[str]:
    """Keys that have no effect with a LightningDataModule."""
    if cfg.trainer.accumulate_grad_batches == "auto":
        yield f"trainer.accumulate_grad_batches=auto divides Lockstep's batches, but data={title(cfg.data)} makes its own. Type a number."
    if cfg.data.get("num_workers") == "auto":
        yield f"data.num_workers=auto is for Lockstep's dataloaders, but data={title(cfg.data)} has its own. Type a number."
