"""Runs a user's LightningModule unchanged, with its own steps, optimizers and figures."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig

from lockstep.config.identity import title
from lockstep.config.instantiate import create, mixing, to_plain
from lockstep.config.targets import target_of
from lockstep.data.datamodule import DataModule
from lockstep.errors import raise_problems
from lockstep.machine.world import spec_of


def is_foreign(cfg: DictConfig) -> bool:
    """Whether the task is a LightningModule of the user's."""
    target: Any = target_of(cfg.task._target_, "task")
    return isinstance(target, type) and issubclass(target, pl.LightningModule)


def picklable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A partial that can be pickled: Hydra's cannot, and Lightning drops hyperparameters that cannot."""
    return partial(function.func, *function.args, **function.keywords) if isinstance(function, partial) else function


def create_module(cfg: DictConfig) -> pl.LightningModule:
    """Creates the module of the config.

    Raises:
        UserError: keys are wrong, or would have no effect.
    """
    raise_problems(config_problems(cfg))
    task = to_plain(cfg.task)
    partials = {name: node for name, node in task.items() if isinstance(node, Mapping) and node.get("_partial_")}
    made = {name: picklable(create(node, f"task.{name}")) for name, node in partials.items()}
    return create({k: v for k, v in task.items() if k not in made}, "task", **made)


def config_problems(cfg: DictConfig) -> Iterator[str]:
    """Problems: config groups and keys that the module does not use."""
    name = title(cfg.task)
    if idle := [group for group in ("model", "optim", "schedule") if cfg[group]]:
        yield (
            f"{', '.join(idle)} would have no effect: {cfg.task._target_} has its own. "
            f"Type {' '.join(f'{group}=none' for group in idle)}, or begin its config with defaults: [lightning_module]."
        )
    for operation in mixing(cfg):
        yield f"augment.{operation} mixes the losses of two targets, which a task computes and {name} does not. Leave it out: ~augment.{operation}."
    if cfg.task.get("metrics"):
        yield f"task.metrics has no effect: {name} logs its own figures. Leave it out."
    if cfg.exact.shards:
        yield f"exact.shards={cfg.exact.shards} is about the steps of a task, and {name} makes its own. Leave it out."
    if cfg.compile:
        yield f"compile=true compiles the network of the model group, but {name} makes its own. Leave it out; a module may call self.<network>.compile()."
    if spec_of(cfg).is_sharded or spec_of(cfg).splits_batches:
        yield f"strategy={cfg.strategy.name} changes how a task's network is called; {name} calls its own. Type strategy=ddp."


def problems(cfg: DictConfig, module: pl.LightningModule, data: pl.LightningDataModule) -> Iterator[str]:
    """Problems: what the module and the data define but would be ignored."""
    name = type(module).__name__
    hooks = ("train_dataloader", "val_dataloader", "test_dataloader")
    if loaders := [hook for hook in hooks if is_overridden(hook, module)]:
        yield f"{name}.{loaders[0]} would be ignored: data={title(cfg.data)} provides the batches. Move it into a LightningDataModule and name that with data._target_."
    if cfg.checkpoint.monitor and not evaluates(module, data, "validation", "val"):
        yield f"checkpoint.monitor={cfg.checkpoint.monitor} has no effect: {name} or the data has no validation. Type task.monitor=null."


def evaluates(module: pl.LightningModule, data: pl.LightningDataModule, step: str, loader: str) -> bool:
    """Whether there is both a step and a dataloader for it."""
    return is_overridden(f"{step}_step", module) and is_overridden(f"{loader}_dataloader", data)


def promises(module: pl.LightningModule, data: pl.LightningDataModule, world: int) -> str:
    """One line on which of Lockstep's promises hold for this module."""
    name = type(module).__name__
    own = "the loss is averaged as the module does it; test figures are the module's own"
    if not isinstance(data, DataModule):
        return (
            f"task: {name}'s own steps on {type(data).__name__}'s own dataloaders: one-format checkpoints hold; batches are theirs, "
            f"so each process has its own, and a run resumes exactly from the end of an epoch only; {own}"
        )
    resume = "exact resume" if world < 3 else "resume to float rounding"  # see Replicated.rebuild_buckets
    return f"task: {name}'s own steps: the same batches, {resume} and one-format checkpoints hold; {own}"
