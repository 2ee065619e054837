"""Runs a user's LightningModule unchanged, with its own steps, optimizers and figures."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.config.identity import title
from lockstep.config.instantiate import create, target_of, to_plain
from lockstep.config.signatures import parameters
from lockstep.data.datamodule import DataModule
from lockstep.errors import raise_problems
from lockstep.models.network import network
from lockstep.training.schedules import asks_for_steps, scheduler
from lockstep.training.steps import total_steps

# Constructor arguments that the engine provides if the signature names them, and the groups they come from.
GROUPS = {"net": "model", "optimizer": "optim", "scheduler": "schedule"}


def is_foreign(cfg: DictConfig) -> bool:
    """Whether the task is a LightningModule of the user's."""
    target: Any = target_of(cfg.task._target_, "task")
    return isinstance(target, type) and issubclass(target, pl.LightningModule)


def asked(task: Mapping[str, Any]) -> list[str]:
    """The GROUPS that the module's constructor names."""
    named = parameters(task["_target_"]) or {}
    return [argument for argument in GROUPS if argument in named and argument not in task]


def picklable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A partial that can be pickled: Hydra's cannot, and Lightning drops hyperparameters that cannot."""
    return partial(function.func, *function.args, **function.keywords) if isinstance(function, partial) else function


class Scheduler:
    """The schedule of the config, called with the optimizer only, as modules do."""

    def __init__(self, make: Callable[..., LRScheduler]) -> None:
        self.make = make
        self.module: pl.LightningModule | None = None  # the module that gets it
        self.made: LRScheduler | None = None
        self.counts_steps = asks_for_steps(make)

    def __getstate__(self) -> dict[str, Any]:
        """Drops the module, so copies among the hyperparameters do not include it."""
        return {**vars(self), "module": None, "made": None}

    def __call__(self, optimizer: Optimizer) -> LRScheduler:
        assert self.module is not None
        self.made = scheduler(self.make, optimizer, total_steps(self.module.trainer))
        return self.made


@dataclass
class Given:
    """What the engine gave to a module, which keeps it as the attribute `lockstep`."""

    net: nn.Module | None = None
    network_arguments: dict[str, Any] = field(default_factory=dict)  # what the data offered the network
    scheduler: Scheduler | None = None


def given_to(module: pl.LightningModule) -> Given:
    given: Any = module.lockstep
    assert isinstance(given, Given)
    return given


def offered_by(data: pl.LightningDataModule) -> dict[str, Any]:
    """Arguments offered to the network, besides those of a task."""
    if not isinstance(data, DataModule):
        return {}
    classes = {"num_classes": len(data.about["classes"])} if data.about.get("classes") else {}
    return {**classes, **data.dataset.network_arguments()}


def create_module(
    cfg: DictConfig, offered: dict[str, Any], optimizer: Callable[[], Any], *, with_weights: bool
) -> pl.LightningModule:
    """Creates the module of the config, with the network, optimizer and schedule that it names. The network is offered `offered`.

    Raises:
        UserError: keys are wrong, or would have no effect.
    """
    raise_problems(config_problems(cfg))
    wanted = asked(cfg.task)
    net = network(to_plain(cfg.model), offered, with_weights=with_weights) if "net" in wanted else None
    schedule = (
        Scheduler(picklable(create(cfg.schedule, "schedule"))) if "scheduler" in wanted and cfg.schedule else None
    )
    parts = {"net": net, "optimizer": picklable(optimizer()) if "optimizer" in wanted else None, "scheduler": schedule}
    given = {name: parts[name] for name in wanted}
    task = to_plain(cfg.task)
    for name, node in task.items():
        if isinstance(node, Mapping) and node.get("_partial_"):
            given[name] = picklable(create(node, f"task.{name}"))
    rest = {name: node for name, node in task.items() if name not in given}
    module: pl.LightningModule = create(rest, "task", **given)
    object.__setattr__(module, "lockstep", Given(net, offered, schedule))
    if schedule:
        schedule.module = module
    return module


def config_problems(cfg: DictConfig) -> Iterator[str]:
    """Problems: config groups the module does not use, and ones it needs."""
    name, wanted = title(cfg.task), asked(cfg.task)
    idle = [group for argument, group in GROUPS.items() if cfg[group] and argument not in wanted]
    if idle:
        arguments = ", ".join(argument for argument, group in GROUPS.items() if group in idle)
        base = ", or begin its config with defaults: [lightning_module]" if len(idle) == len(GROUPS) else ""
        yield (
            f"{', '.join(idle)} would have no effect: {cfg.task._target_} takes no argument {arguments}. "
            f"Type {' '.join(f'{group}=none' for group in idle)}{base}."
        )
    for argument in wanted:
        if argument != "scheduler" and not cfg[GROUPS[argument]]:
            yield f"{cfg.task._target_} needs {argument}. Choose it with {GROUPS[argument]}=<name>."
    if cfg.task.get("metrics"):
        yield f"task.metrics has no effect: {name} logs its own figures. Leave it out."
    if cfg.compile and "net" not in wanted:
        yield f"compile=true compiles the network of the model group, but {name} makes its own. Leave it out; a module may call self.<network>.compile()."
    if cfg.strategy.traits.shards or cfg.strategy.traits.splits_batches:
        yield f"strategy={cfg.strategy.name} changes how a task's network is called; {name} calls its own. Type strategy=ddp."


def problems(cfg: DictConfig, module: pl.LightningModule, data: pl.LightningDataModule) -> Iterator[str]:
    """Problems: what the module and the data define but would be ignored."""
    name = type(module).__name__
    loaders = [
        hook for hook in ("train_dataloader", "val_dataloader", "test_dataloader") if is_overridden(hook, module)
    ]
    if loaders:
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
