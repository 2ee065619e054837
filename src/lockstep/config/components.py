"""Rules about the classes that a config names: by their sources, by what shipped ones are known to need, and, of the user's own, by
what they are once imported."""

import importlib
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig

from lockstep.config.identity import title
from lockstep.config.instantiate import ENGINE_DATA, has_own_loaders, names, operation_problems, problems, to_plain
from lockstep.config.rules import division_problems, fused_problem
from lockstep.config.targets import is_shipped, parameters
from lockstep.config.words import nearest, plain
from lockstep.machine.world import World, accelerator_of


def data_set_problems(cfg: DictConfig, _: World) -> Iterator[str]:
    """Asks Lockstep's own data sets, which import no torch; others are asked when they are created."""
    module, name = str(cfg.data.get("_target_")).rpartition(".")[::2]
    if module.startswith("lockstep.data"):
        data_set = getattr(importlib.import_module(module), name, None)
        yield from data_set.problems(plain(cfg.data)) if data_set else ()


# --- What the classes of a config take: first by their sources, then, for the user's own, by what they are once imported ---


def optimizer_node(cfg: DictConfig) -> dict[str, Any]:
    """The `optim` node, with `fused: auto` decided for the strategy of this process."""
    node = to_plain(cfg.optim)
    if node.get("fused") != "auto":
        return node
    # with exact.shards all strategies compute as shards do
    unknown = cfg.exact.shards and accelerator_of(str(cfg.trainer.accelerator)) != "cpu"
    return {**node, "fused": fused_problem(cfg) is None and not unknown}


def components(cfg: DictConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The nodes that name a class, by key, without `data` and `augment`."""
    nodes: dict[str, Any] = {
        key: cfg[key] for key in ("task", "model", "strategy", "schedule") if "_target_" in cfg[key]
    }
    nodes |= {"optim": optimizer_node(cfg)} if "_target_" in cfg.optim else {}
    for key in ("task.metrics", "callbacks", "logger"):
        group = cfg.task.get("metrics") if key == "task.metrics" else cfg[key]
        nodes |= {f"{key}.{name}": node for name, node in (group or {}).items()}
    return ((key, to_plain(node)) for key, node in nodes.items())


def source_problems(cfg: DictConfig, _: World) -> Iterator[str]:
    """Names and arguments that are wrong by the sources of the classes, which are not imported."""
    for key, node in components(cfg):
        yield from problems(node, key, imported=False)
    data = to_plain(cfg.data)
    engine = () if has_own_loaders(cfg) else ENGINE_DATA
    taken = parameters(data["_target_"], imported=False) or ()
    yield from problems({k: v for k, v in data.items() if k not in engine or k in taken}, "data", imported=False)


def imported_problems(cfg: DictConfig, world: World, *, evaluating: bool = False) -> list[str]:
    """What only the user's own classes themselves can tell, which may import torch. What has trained is not asked again."""
    told: list[str] = []
    if evaluating:
        return told
    for key, node in components(cfg):
        if not is_shipped(node):
            from lockstep.compat import others  # noqa: F401  # before Lightning

            told += problems(node, key)
    if names(cfg, shipped=False):
        told += operation_problems(cfg, shipped=False)
        told += () if told or has_own_loaders(cfg) else division_problems(cfg, world)
    return told


# --- Checks that apply only to the classes that come with Lockstep. Free of torch ---

TRAINED = ("train/loss", "train/lr")  # what the training of every task logs
MEASURED = ("_per_s", "_memory_gib")  # endings of figures that depend on the data's unit or on the device


@dataclass(frozen=True)
class TaskSpec:
    """What the class of a shipped task would say, for checks before torch is imported."""

    needs: tuple[str, ...]  # of the data's `about`
    metrics: tuple[str, ...]
    one_each: Mapping[str, str] = field(default_factory=dict)  # keys that hold a number for each of what the data has


TASKS = {
    "lockstep.tasks.Classification": TaskSpec(("classes",), ("acc",), {"class_weights": "classes"}),
    "lockstep.tasks.LanguageModel": TaskSpec(("vocabulary", "sequence_length"), ("perplexity", "acc")),
    "lockstep.tasks.Multilabel": TaskSpec(("labels",), ("f1", "acc"), {"pos_weight": "labels"}),
    "lockstep.tasks.Regression": TaskSpec(("targets",), ("rmse", "mae", "r2")),
    "lockstep.tasks.Segmentation": TaskSpec(("classes",), ("iou", "acc")),
}


def task_problems(cfg: DictConfig, _: object) -> Iterator[str]:
    """Checks shipped tasks; build.py checks other tasks, once their class is imported."""
    if not is_shipped(cfg.task):
        if cfg.checkpoint.monitor and cfg.checkpoint.mode not in ("max", "min"):
            yield f"checkpoint.mode={cfg.checkpoint.mode} is not possible; it takes one of max, min. Type checkpoint.mode=min."
        return
    for name in {"loss", "count"} & set(cfg.task.get("metrics") or ()):
        yield f"task.metrics.{name}: every task already logs {name}. Type another name."
    yield from missing_groups(cfg)
    if spec := TASKS.get(cfg.task._target_):
        added = cfg.task.get("metrics") or ()
        yield from monitor_problems(cfg, [*spec.metrics, *(f"{name}{rest}" for name in added for rest in ("", "/*"))])


def monitors(cfg: DictConfig) -> dict[str, str]:
    """The keys that name a figure to watch, with their figures. A callback that watches the checkpoints' figure is left out."""
    typed = "task.monitor" if cfg.task.get("monitor") == cfg.checkpoint.monitor else "checkpoint.monitor"
    watching = {f"callbacks.{name}.monitor": node.get("monitor") for name, node in cfg.callbacks.items()}
    others = {key: str(name) for key, name in watching.items() if name not in (None, cfg.checkpoint.monitor)}
    return ({typed: str(cfg.checkpoint.monitor)} if cfg.checkpoint.monitor else {}) | others


def monitor_problems(cfg: DictConfig, figures: list[str]) -> Iterator[str]:
    """Monitors that nothing logs. The figures of callbacks that are not Lockstep's are known only when the run logs them."""
    own = all(str(node.get("_target_")).startswith("lockstep.") for node in cfg.callbacks.values())
    for key, monitor in monitors(cfg).items():
        of_callback = key.startswith("callbacks.")
        names = [*(f"val/{figure}" for figure in ("loss", *figures)), *(TRAINED if of_callback else ())]
        known = any(monitor == name or (name.endswith("/*") and monitor.startswith(name[:-1])) for name in names)
        later = of_callback and not monitor.startswith("val/") and (not own or monitor.endswith(MEASURED))
        if not known and not later:
            yield f"{key}={monitor}: the {'run' if of_callback else 'validation'} logs {', '.join(names)}{nearest(monitor, names)}. Type one of them, or add it to task.metrics."


def about_problems(cfg: DictConfig, about: Mapping[str, Any]) -> Iterator[str]:
    """Whether the data has what a shipped task needs."""
    if (spec := TASKS.get(cfg.task._target_)) is None:
        return
    there = [k for k, v in about.items() if v is not None and not (isinstance(v, Sized) and len(v) == 0)]
    if missing := [name for name in spec.needs if name not in there]:
        yield (
            f"task={title(cfg.task)} needs {', '.join(missing)} in the `about` of the data; data={title(cfg.data)} has "
            f"{', '.join(there) or 'nothing'}. Choose another task or data, or add it to the `about` of your data set."
        )
    for name, of in spec.one_each.items():
        given, count = plain(cfg.task.get(name)), len(about[of]) if of in there else 0
        if isinstance(given, list) and len(given) != count:
            yield f"task.{name} has {len(given)} numbers; the data has {count} {of}. Give one for each."


def missing_groups(cfg: DictConfig) -> Iterator[str]:
    """Groups that every Task needs but that are `none`."""
    for group in ("model", "optim", "schedule"):
        if not cfg[group]:
            yield f"{group}=none is for a LightningModule with its own {group}; task={title(cfg.task)} needs one. Choose it with {group}=<name>."
