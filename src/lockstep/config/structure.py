"""Whether a config has the groups, classes and keys that the engine reads. Free of torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config.admitted import is_shipped
from lockstep.config.schema import CLOSED, GROUPS, KEYS, NEEDED, OPTIONAL, RECIPES, SEVERAL, TRAITS
from lockstep.config.words import shown

CLASS = "my_package.my_module.MyClass"


def missing_keys(cfg: DictConfig) -> Iterator[str]:
    """Keys outside of groups, which the engine reads before all others."""
    yield from without(cfg, "", [key for key in KEYS if "." not in key])


def without(node: Mapping[Any, Any], group: str, names: list[str]) -> Iterator[str]:
    for name in names:
        if name not in list(node.keys()):  # `in` denies missing ones
            key = f"{group}.{name}".lstrip(".")
            example = KEYS[key].example if key in KEYS else "<value>"
            yield f"{key} is not in the config, and the engine reads it. Type for example {key}={example}."


def structure_problems(cfg: DictConfig) -> Iterator[str]:
    """Groups that are missing or hold no keys; classes and keys that are missing in them."""
    yield from missing_keys(cfg)
    for group in (name for name in GROUPS if name not in RECIPES):
        node = plain_node(cfg, group)
        if not isinstance(node, Mapping):
            there = f"{group}={shown(node)} is not possible" if group in cfg else f"{group} is not in the config"
            yield f"{there}: the engine reads the keys of this group. Choose an option, {group}=<name>, or set single keys, {group}.<key>=<value>."
        elif group in CLOSED:
            yield from without(node, group, [key.partition(".")[2] for key in KEYS if key.startswith(f"{group}.")])
        elif group in SEVERAL:
            yield from node_problems(node, group)
        elif node or group not in OPTIONAL:
            yield from class_problems(node, group)
            if group != "data" or is_shipped(node):  # config/classes.py asks other data
                yield from without(node, group, list(NEEDED.get(group, ())))
            yield from trait_problems(node.get("traits")) if "traits" in NEEDED.get(group, ()) else ()
            if group == "task" and "metrics" in node:
                yield from node_problems(node["metrics"], f"{group}.metrics")


def plain_node(cfg: DictConfig, group: str) -> Any:
    """The group without looking up what it refers to; as it stands if that is not possible."""
    try:
        node = cfg.get(group)
        return OmegaConf.to_container(node) if isinstance(node, DictConfig) else node
    except OmegaConfBaseException as e:
        return str(e).partition("\n")[0]


def class_problems(node: Any, key: str) -> Iterator[str]:
    if not isinstance(node, Mapping):
        yield f"{key}={shown(node)} is not possible: it names a class and its arguments. Type for example {key}={{_target_: {CLASS}}}."
        return
    target = node.get("_target_")
    if target in (None, "???"):
        yield f"{key}._target_ is missing; it names the class, for example {key}._target_={CLASS}."
    elif not isinstance(target, str) or "." not in target.strip("."):
        yield f"{key}._target_={shown(target)} is not possible; it names a class, for example {key}._target_={CLASS}."


def node_problems(nodes: Any, key: str) -> Iterator[str]:
    """Problems of a group of named nodes, such as `callbacks`."""
    if not isinstance(nodes, Mapping):
        yield f"{key}={shown(nodes)} is not possible: it holds classes by name. Type for example {key}={{}}."
        return
    for name, node in nodes.items():
        yield from class_problems(node, f"{key}.{name}")


def trait_problems(traits: Any) -> Iterator[str]:
    """Problems of the facts about a strategy: flags, and a list of precisions or null."""
    kinds = {name: list | None if name == "precisions" else bool for name in TRAITS}
    known = isinstance(traits, Mapping) and set(traits) == set(kinds)
    if not known or not all(isinstance(value, kinds[name]) for name, value in traits.items()):
        yield (
            f"strategy.traits={shown(traits)} is not possible; it has {', '.join(TRAITS[:-1])} (true or false) and {TRAITS[-1]} (a list or null). "
            "They are facts about the strategy: choose one with strategy=<name>."
        )
