"""Checks that need the classes a config names: their signatures, and the kind of data. Some of these import torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from lockstep.config import instantiate
from lockstep.config.batches import division_of_whole_batch, division_problems
from lockstep.config.checks import fused_problem, loading_problems, wrong_values
from lockstep.config.identity import title
from lockstep.config.instantiate import (
    ENGINE_DATA,
    data_set_node,
    has_own_loaders,
    problems,
    target_of,
    target_problems,
    to_plain,
)
from lockstep.config.targets import is_shipped
from lockstep.errors import UserError
from lockstep.machine.world import World, accelerator_of


def optimizer_node(cfg: DictConfig) -> dict[str, Any]:
    """The `optim` node, with `fused: auto` decided for the strategy of this process."""
    node = to_plain(cfg.optim)
    if node.get("fused") != "auto":
        return node
    # with exact.shards all strategies compute as shards do
    unknown = cfg.exact.shards and accelerator_of(str(cfg.trainer.accelerator)) != "cpu"
    return {**node, "fused": fused_problem(cfg) is None and not unknown}


def components(cfg: DictConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The nodes that name a class, by key, without `data`."""
    nodes: dict[str, Any] = {
        key: cfg[key] for key in ("task", "model", "strategy", "optim", "schedule") if "_target_" in cfg[key]
    }
    nodes |= {"optim": optimizer_node(cfg)} if "optim" in nodes else {}
    for key in ("task.metrics", "callbacks", "logger"):
        group = cfg.task.get("metrics") if key == "task.metrics" else cfg[key]
        nodes |= {f"{key}.{name}": node for name, node in (group or {}).items()}
    return ((key, to_plain(node)) for key, node in nodes.items())


def component_problems(cfg: DictConfig, *, everything: bool) -> Iterator[str]:
    """Keys that a class does not accept. Shipped classes take seconds to import, so they are checked only with `everything`."""
    for key, node in components(cfg):
        if everything or not is_shipped(node):
            from lockstep.compat import others  # noqa: F401  # before Lightning

            yield from problems(node, key)
    if not is_shipped(cfg.task) and not list(target_problems(to_plain(cfg.task), "task")):
        # build.py asks the object again, which may have set it itself
        whole = getattr(target_of(cfg.task._target_, "task"), "between_samples", False)
        yield from division_of_whole_batch(cfg) if whole else ()


def data_problems(cfg: DictConfig, world: World, *, evaluating: bool) -> Iterator[str]:
    """Checks the `data` node. The engine's keys are checked for every DataSet; a LightningDataModule has none of them."""
    try:
        if has_own_loaders(cfg):
            yield from own_loader_problems(cfg)
            yield from problems(to_plain(cfg.data), "data")
            return
        yield from problems(data_set_node(cfg), "data")
    except UserError as e:
        yield from e.problems
        return
    if "batch_size" not in cfg.data:
        yield "data.batch_size is missing: it is the global batch of one optimizer step. Type +data.batch_size=64."
        return
    if is_shipped(cfg.data):  # config/checks.py has checked it without importing its class
        return
    if wrong := list(wrong_values(cfg, [f"data.{key}" for key in ENGINE_DATA])):
        yield from wrong
        return
    yield from loading_problems(cfg, world)
    yield from () if evaluating else division_problems(cfg, world)


def operation_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    """Checks the user's own operations; config/checks.py has checked those of Lockstep, and the batch with them."""
    if not instantiate.names(cfg, shipped=False):
        return
    yield from (wrong := list(instantiate.operation_problems(cfg, shipped=False)))
    if not wrong and is_shipped(cfg.data):
        yield from division_problems(cfg, world)


def own_loader_problems(cfg: DictConfig) -> Iterator[str]:
    """Keys that have no effect with a LightningDataModule."""
    if cfg.exact.shards:
        yield f"exact.shards={cfg.exact.shards} divides Lockstep's batches, but data={title(cfg.data)} makes its own. Leave it out."
    if cfg.trainer.accumulate_grad_batches == "auto":
        yield f"trainer.accumulate_grad_batches=auto divides Lockstep's batches, but data={title(cfg.data)} makes its own. Type a number."
    if cfg.data.get("num_workers") == "auto":
        yield f"data.num_workers=auto is for Lockstep's dataloaders, but data={title(cfg.data)} has its own. Type a number."
