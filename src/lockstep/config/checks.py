"""Every check of a config, across its groups, without torch: reports all mistakes together."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from lockstep.config.components import data_set_problems, source_problems, task_problems
from lockstep.config.instantiate import ENGINE_DATA, operation_problems
from lockstep.config.rules import device_problems, environment_problems, evaluation_problems, training_problems
from lockstep.config.schema import CLOSED, GROUPS, KEYS, NEEDED, OPTIONAL, PREDICT, RECIPES, SEVERAL
from lockstep.config.targets import LOADERS, is_a, is_shipped
from lockstep.config.words import dotted, nearest, plain, shown
from lockstep.machine.world import world_of

# --- The groups, classes, keys and values of a config, each by itself ---

CLASS = "my_package.my_module.MyClass"
# Arguments of Lightning's Trainer that Lockstep sets from other keys.
OWNED = {
    "trainer.strategy": "choose it with strategy=ddp",
    "trainer.logger": "choose loggers with logger=[csv,wandb]",
    "trainer.callbacks": "choose callbacks with callbacks=[default,ema]",
    "trainer.plugins": "the strategy and the precision set them; see src/lockstep/build_trainer.py",
    "trainer.default_root_dir": "name the run directory with run=<name>",
    "trainer.fast_dev_run": "use debug=one_batch, which leaves a report and a checkpoint",
    "trainer.overfit_batches": "use debug=overfit",
    "trainer.use_distributed_sampler": "Lockstep's own sampler always distributes the batches",
    "trainer.barebones": "use logger=csv callbacks=[] trainer.enable_progress_bar=false",
    "trainer.model_registry": "not used by this project",
    "trainer.limit_predict_batches": "nothing predicts in training",
    "trainer.enable_autolog_hparams": "the whole config is logged",
}


Written = Mapping[str, str]  # interpolations by key


def resolved(cfg: DictConfig) -> tuple[DictConfig, Written, list[str]]:
    """`cfg` with values in place of interpolations, what was written there, and the problems of those without a value (None then)."""
    whole: Any = OmegaConf.to_container(cfg)
    written = {key: text for key, text in dotted(whole).items() if "${" in str(text)}
    problems = []
    for key, text in written.items():
        *path, name = key.split(".")
        node = reduce(lambda tree, part: tree[part], path, whole)
        try:
            node[name] = plain(reduce(lambda tree, part: tree[part], key.split("."), cfg))
        except OmegaConfBaseException as e:
            node[name] = None
            why = (
                "refers to a key that is not in the config"
                if isinstance(e, InterpolationResolutionError)
                else str(e).splitlines()[0]
            )
            problems.append(f"{key}={text} {why}. Set that key, or {key}.")
    return OmegaConf.create(whole), written, problems


def structure_problems(whole: Mapping[str, Any]) -> Iterator[str]:
    """Groups, classes and keys that are missing, and keys that nothing reads. `whole` is a config without interpolations."""
    top = [key for key in KEYS if "." not in key]
    yield from key_problems(whole, "", top, [*top, *GROUPS])
    for group in (name for name in GROUPS if name not in RECIPES):
        node = whole.get(group)
        if not isinstance(node, Mapping):
            there = f"{group}={shown(node)} is not possible" if group in whole else f"{group} is not in the config"
            yield f"{there}: the engine reads the keys of this group. Choose an option, {group}=<name>, or set single keys, {group}.<key>=<value>."
        elif group in CLOSED:
            keys = [key for key in KEYS if key.startswith(f"{group}.")]
            yield from key_problems(node, f"{group}.", keys, keys)
        elif group in SEVERAL:
            yield from node_problems(node, group)
        elif node or group not in OPTIONAL:
            yield from class_problems(node, group)
            if group != "data" or not is_a(str(node.get("_target_")), LOADERS):
                yield from key_problems(node, f"{group}.", [f"{group}.{name}" for name in NEEDED.get(group, ())])
            if group == "task" and "metrics" in node:
                yield from node_problems(node["metrics"], f"{group}.metrics")


def key_problems(
    node: Mapping[Any, Any], place: str, needed: list[str], known: list[str] | None = None
) -> Iterator[str]:
    """Keys that a node lacks, and, where all keys are known, those that nothing reads."""
    there = [f"{place}{name}" for name in node]
    for key in (key for key in needed if key not in there):
        yield f"{key} is not in the config, and the engine reads it. Type for example {key}={KEYS[key].example}."
    for key in (key for key in there if known and key not in known):
        owned = (
            f"cannot be set: {OWNED[key]}"
            if key in OWNED
            else f"is not a key of this project{nearest(key, known or [])}"
        )
        yield f"{key} {owned}."


def class_problems(node: Any, key: str) -> Iterator[str]:
    example = f"for example {key}._target_={CLASS}."
    target = node.get("_target_") if isinstance(node, Mapping) else ""
    if not isinstance(node, Mapping):
        yield f"{key}={shown(node)} is not possible: it names a class and its arguments. Type for example {key}={{_target_: {CLASS}}}."
    elif target in (None, "???"):
        yield f"{key}._target_ is missing; it names the class, {example}"
    elif not isinstance(target, str) or "." not in target.strip("."):
        yield f"{key}._target_={shown(target)} is not possible; it names a class, {example}"


def node_problems(nodes: Any, key: str) -> Iterator[str]:
    """Problems of a group of named nodes, such as `callbacks`."""
    if not isinstance(nodes, Mapping):
        yield f"{key}={shown(nodes)} is not possible: it holds classes by name. Type for example {key}={{}}."
        return
    for name, node in nodes.items():
        yield from class_problems(node, f"{key}.{name}")


def wrong_values(cfg: DictConfig, keys: Sequence[str]) -> Iterator[str]:
    """Problems of the values of `keys`, before the rest of a config is known to be right."""
    whole, written, unresolved = resolved(OmegaConf.masked_copy(cfg, [key for key in keys if key in cfg]))
    top = [key for key in keys if "." not in key and key not in cfg]
    yield from (
        f"{key} is not in the config, and the engine reads it. Type for example {key}={KEYS[key].example}."
        for key in top
    )
    yield from unresolved or value_problems(OmegaConf.to_container(whole), written, keys)


def value_problems(whole: Any, written: Written, keys: Iterable[str]) -> Iterator[str]:
    """Problems of the values of `keys`. Those of a class of the user's may be anything that its signature allows."""
    for key in keys:
        *path, name = key.split(".")
        node = reduce(lambda tree, part: tree.get(part) if isinstance(tree, dict) else None, path, whole)
        if not isinstance(node, dict) or name not in node:
            continue
        if (
            "_target_" in node
            and not is_shipped(node)
            and not (path == ["data"] and name in ENGINE_DATA and not is_a(str(node["_target_"]), LOADERS))
        ):
            continue
        value, kind = node[name], {**KEYS, **PREDICT}[key]
        if value == "???":
            yield f"{key} is missing; type {key}=<{name}>."
        elif not kind.accepts(value):
            origin = written.get(key)
            given = f"{shown(value)}, from {origin}," if origin else shown(value)
            if (
                origin is None or (referred := KEYS.get(str(origin)[2:-1])) is None or referred.accepts(value)
            ):  # else that key is told
                yield f"{key}={given} is not possible; it takes {kind.takes}. Type for example {key}={kind.example}."


EVALUATION = (device_problems, evaluation_problems, data_set_problems)
TRAINING = (
    source_problems,
    device_problems,
    data_set_problems,
    operation_problems,
    task_problems,
    training_problems,
    environment_problems,
)


def check(cfg: DictConfig, *, evaluating: bool = False) -> list[str]:
    """All problems of a composed config; an empty list when it can run. Reads no data and imports no torch."""
    cfg, written, problems = resolved(cfg)
    whole: Any = OmegaConf.to_container(cfg)
    structure = list(structure_problems(whole))
    values = value_problems(
        whole, written, [key for key in KEYS if not any(text.startswith(f"{key}=") for text in problems)]
    )
    problems += [*structure, *values]
    if any(
        " is not a key of " not in text and "cannot be set" not in text for text in structure
    ):  # the other checks read these keys
        return list(dict.fromkeys(problems))
    for cross_check in EVALUATION if evaluating else TRAINING:
        try:
            problems += cross_check(cfg, world_of(cfg))
        except (TypeError, ValueError, LookupError, ArithmeticError, OmegaConfBaseException):
            if not problems:  # otherwise a value that is already reported caused it
                raise
    return list(dict.fromkeys(problems))
