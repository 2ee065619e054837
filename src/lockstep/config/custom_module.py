"""A custom LightningModule as the task: it runs unchanged, with its own steps, optimizers and metrics."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from lockstep.config.identity import title
from lockstep.config.instantiate import create, mixing, target_of, to_plain
from lockstep.errors import raise_problems
from lockstep.machine.world import spec_of

if TYPE_CHECKING:
    import lightning.pytorch as pl


def uses_custom_module(cfg: DictConfig) -> bool:
    """Whether the task is a LightningModule of the user's. Imports its class."""
    import lightning.pytorch as pl

    target: Any = target_of(cfg.task._target_, "task")
    return isinstance(target, type) and issubclass(target, pl.LightningModule)


def create_custom_module(cfg: DictConfig) -> "pl.LightningModule":
    """Creates the module of the config.

    Raises:
        UserError: keys are wrong, or would have no effect.
    """
    raise_problems(custom_module_problems(cfg))
    task = to_plain(cfg.task)
    partials = {name: node for name, node in task.items() if isinstance(node, Mapping) and node.get("_partial_")}
    made = {name: create(node, f"task.{name}") for name, node in partials.items()}
    for name, hydras in made.items():  # Hydra's cannot be pickled, and Lightning drops hyperparameters that cannot
        made[name] = partial(hydras.func, *hydras.args, **hydras.keywords)
    return create({k: v for k, v in task.items() if k not in made}, "task", **made)


def custom_module_problems(cfg: DictConfig) -> Iterator[str]:
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
    if spec_of(cfg.strategy).is_sharded or spec_of(cfg.strategy).splits_batches:
        yield f"strategy={cfg.strategy.name} changes how a task's network is called; {name} calls its own. Type strategy=ddp."
