"""Keys that had another name in an earlier version: one table for command lines, saved configs and checkpoints. Free of torch."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# 0.1 had the keys of the loader in `data`.
LOADER_KEYS = (
    "batch_size", "eval_batch_size", "val_fraction", "val_gap", "folds", "fold", "limit_train", "balance", "repeats", "num_workers",
    "prefetch_factor", "persistent_workers", "on_device",
)  # fmt: skip
RENAMES = {f"data.{name}": f"loader.{name}" for name in LOADER_KEYS}
# Classes that moved to the template.
MOVED = {
    "lockstep.models.BasicNet": "project.model.BasicNet",
    "lockstep.data.Mnist": "project.data.Mnist",
    "lockstep.data.Cifar10": "project.data.Cifar10",
}


def renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A saved config of any version under the keys of today: a renamed key keeps its value. A class of the user's keeps those of `data` as
    well, because only the class says whose they are (launch/resuming.py)."""
    found = {group: with_new_target(node) for group, node in config.items()}
    data = config.get("data")
    if "loader" in config or not isinstance(data, Mapping):
        return found
    moved = {key: data[key] for key in LOADER_KEYS if key in data}
    left = dict(found["data"])
    if str(data.get("_target_")).startswith("lockstep."):
        left = {key: value for key, value in left.items() if key not in moved}
    return {**found, "data": left, "loader": moved}


def with_new_target(node: Any) -> Any:
    """A node of a config, which names its class where it is today."""
    moved = MOVED.get(str(node.get("_target_"))) if isinstance(node, Mapping) else None
    return {**node, "_target_": moved} if moved else node


def renamed_override(override: str, is_there: Callable[[str], bool] = lambda _: False) -> str:
    """An override under the key of today. `is_there`: whether the config has a key itself, as an argument of a class of the user's."""
    key, equals, value = override.partition("=")
    return f"{RENAMES[key]}{equals}{value}" if key in RENAMES and not is_there(key) else override


def renamed_overrides(overrides: Sequence[str], is_there: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Overrides under the keys of today, and what to say of those that had another one."""
    new = [renamed_override(override, is_there) for override in overrides]
    pairs = [(old.partition("=")[0], now.partition("=")[0]) for old, now in zip(overrides, new, strict=True)]
    return new, [f"{old} is {now} now" for old, now in pairs if old != now]


def overrides_of(report: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Those that a report keeps, under the keys of today; None if it keeps none, as of an earlier version."""
    kept = report.get("overrides")
    return None if kept is None else tuple(map(renamed_override, shlex.split(kept)))
