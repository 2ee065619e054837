"""Keys that were renamed since an earlier version, for command lines, saved configs and checkpoints. Free of torch."""

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


def with_new_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """A saved config of any version, with today's keys: a renamed key keeps its value.

    For a user class, `data` also keeps the old keys, because only the class determines whether they are its arguments
    (launch/resuming.py).
    """
    groups = {group: with_new_target(node) for group, node in config.items()}
    data = config.get("data")
    if "loader" in config or not isinstance(data, Mapping):
        return groups
    loader = {key: data[key] for key in LOADER_KEYS if key in data}
    data_node = dict(groups["data"])
    if str(data.get("_target_")).startswith("lockstep."):
        data_node = {key: value for key, value in data_node.items() if key not in loader}
    return {**groups, "data": data_node, "loader": loader}


def with_new_target(node: Any) -> Any:
    """A config node with the current path of its class."""
    target = MOVED.get(str(node.get("_target_"))) if isinstance(node, Mapping) else None
    return {**node, "_target_": target} if target else node


def renamed_override(override: str, has_key: Callable[[str], bool] = lambda _: False) -> str:
    """An override with today's key. `has_key`: whether the config has the old key, as an argument of a user class."""
    key, equals, value = override.partition("=")
    return f"{RENAMES[key]}{equals}{value}" if key in RENAMES and not has_key(key) else override


def renamed_overrides(overrides: Sequence[str], has_key: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Overrides with today's keys, and a message for each renamed key."""
    renamed = [renamed_override(override, has_key) for override in overrides]
    pairs = [(old.partition("=")[0], new.partition("=")[0]) for old, new in zip(overrides, renamed, strict=True)]
    return renamed, [f"{old} was renamed to {new}" for old, new in pairs if old != new]


def overrides_of(report: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The overrides in a report, with today's keys; None if it has none because an earlier version wrote it."""
    overrides = report.get("overrides")
    return None if overrides is None else tuple(map(renamed_override, shlex.split(overrides)))
