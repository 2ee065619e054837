"""Checks that apply only to the classes that come with Lockstep. Free of torch."""

from collections.abc import Iterator, Mapping, Sized
from typing import Any

from omegaconf import DictConfig

from lockstep.config.admitted import is_shipped
from lockstep.config.identity import title
from lockstep.config.words import nearest, plain

TRAINED = ("train/loss", "train/lr")  # what the training of every task logs
MEASURED = ("_per_s", "_memory_gib")  # endings of figures that depend on the data's unit or on the device


def task_problems(cfg: DictConfig, _: object) -> Iterator[str]:
    """Checks shipped tasks; build.py checks other tasks, once their class is imported."""
    if not is_shipped(cfg.task):
        if cfg.checkpoint.monitor and cfg.checkpoint.mode not in ("max", "min"):
            yield f"checkpoint.mode={cfg.checkpoint.mode} is not possible; it takes one of max, min. Type checkpoint.mode=min."
        return
    for name in {"loss", "count"} & set(cfg.task.get("metrics") or ()):
        yield f"task.metrics.{name}: every task already logs {name}. Type another name."
    yield from missing_groups(cfg)
    if cfg.task.get("traits"):
        added = cfg.task.get("metrics") or ()
        figures = [*cfg.task.traits.figures, *(f"{name}{rest}" for name in added for rest in ("", "/*"))]
        yield from monitor_problems(cfg, figures)
    elif cfg.checkpoint.monitor and not cfg.checkpoint.monitor.startswith("val/"):
        yield f"checkpoint.monitor={cfg.checkpoint.monitor} is not possible; it takes a validation figure, val/<name>. Type for example checkpoint.monitor=val/loss."


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
    """Whether the data has what a shipped task needs, by the task's traits."""
    traits = cfg.task.get("traits") if is_shipped(cfg.task) else None
    if traits is None:
        return
    there = [k for k, v in about.items() if v is not None and not (isinstance(v, Sized) and len(v) == 0)]
    if missing := [name for name in traits.needs if name not in there]:
        yield (
            f"task={title(cfg.task)} needs {', '.join(missing)} in the `about` of the data; data={title(cfg.data)} has "
            f"{', '.join(there) or 'nothing'}. Choose another task or data, or add it to the `about` of your data set."
        )
    for name, of in traits.one_each.items():
        given, count = plain(cfg.task.get(name)), len(about[of]) if of in there else 0
        if isinstance(given, list) and len(given) != count:
            yield f"task.{name} has {len(given)} numbers; the data has {count} {of}. Give one for each."


def missing_groups(cfg: DictConfig) -> Iterator[str]:
    """Groups that every Task needs but that are `none`."""
    for group in ("model", "optim", "schedule"):
        if not cfg[group]:
            yield f"{group}=none is for a LightningModule with its own {group}; task={title(cfg.task)} needs one. Choose it with {group}=<name>."
