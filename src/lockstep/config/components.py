"""Checks that apply only to the classes that come with Lockstep. Free of torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from lockstep.config.identity import title

SHIPPED = ("lockstep.", "torch.optim.", "lightning.pytorch.callbacks.", "lightning.pytorch.loggers.")


def is_shipped(node: Mapping[Any, Any]) -> bool:
    """Whether a node names a class that comes with Lockstep. Its keys are known without importing it."""
    return str(node.get("_target_")).startswith(SHIPPED)


def task_problems(cfg: DictConfig, _: object) -> Iterator[str]:
    """Checks shipped tasks; build.py checks other tasks, once their class is imported."""
    if not is_shipped(cfg.task):
        if cfg.checkpoint.monitor and cfg.checkpoint.mode not in ("max", "min"):
            yield f"checkpoint.mode={cfg.checkpoint.mode} is not possible; it takes one of max, min. Type checkpoint.mode=min."
        return
    yield from missing_groups(cfg)
    if not str(cfg.checkpoint.monitor).startswith("val/"):
        yield f"checkpoint.monitor={cfg.checkpoint.monitor or 'null'} is not possible; it takes a validation figure, val/<name>. Type for example checkpoint.monitor=val/loss."


def missing_groups(cfg: DictConfig) -> Iterator[str]:
    """Groups that every Task needs but that are `none`."""
    for group in ("model", "optim", "schedule"):
        if not cfg[group]:
            yield f"{group}=none is for a LightningModule with its own {group}; task={title(cfg.task)} needs one. Choose it with {group}=<name>."
