"""A config that is not validated yet, composed from a command line or read back from a run. Free of torch.

`values_of` validates it and returns its values.
"""

import os
import re
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from lockstep.config.formatting import plain, to_text
from lockstep.config.instantiate import ENGINE
from lockstep.config.project import command
from lockstep.config.renames import with_moved
from lockstep.config.run_config import CLOSED, COMPONENTS, SEVERAL, Component, RunConfig
from lockstep.config.schema import GROUPS, KEYS, NEEDED, OPTIONAL, RECIPES
from lockstep.config.targets import disallowed_targets, target_error
from lockstep.config.validators import RUN_NAME, Validator
from lockstep.errors import UserError, raise_problems
from lockstep.run import CONFIG_ADVICE, LOADER, RunFolder, explain_damage

# --- Names of runs and sweeps ---

SWEEP = "LOCKSTEP_SWEEP"


def timestamp() -> str:
    """A timestamp and four random hex digits, so runs started in the same second get different names."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def sweep_name(run: object, env: MutableMapping[str, str] = os.environ) -> str:
    """The directory of a multirun. Stored in the environment for the sweep's other processes."""
    srun_id = env.get("SLURM_JOB_ID") if "SLURM_STEP_ID" in env else None
    job_id = env.get("TORCHELASTIC_RUN_ID") or srun_id  # under torchrun and srun, every process runs Hydra itself
    return env.setdefault(SWEEP, str(run or f"sweep-{job_id or timestamp()}"))


def was_restarted(env: Mapping[str, str] = os.environ) -> bool:
    """Whether SLURM requeued this job, or torchrun restarted its workers after a failure."""
    return any(int(env.get(name, "0")) > 0 for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))


def name_of_job(model_and_data: str, env: Mapping[str, str] = os.environ) -> str | None:
    """Under torchrun and SLURM, a name with the job's id, so all ranks and restarts agree without communicating."""
    if "TORCHELASTIC_RUN_ID" in env:
        if env["TORCHELASTIC_RUN_ID"] == "none":
            raise UserError("torchrun without --rdzv-id or --standalone has no id to name the run. Set run=<name>.")
        return f"{model_and_data}-{env['TORCHELASTIC_RUN_ID']}"
    if "SLURM_PROCID" in env and "SLURM_JOB_ID" in env:
        return f"{model_and_data}-{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '0')}"
    return None


def name_prefix(model: Component, data: Component) -> str:
    """The start of a run's default name."""
    name = re.sub(r"[^\w.+-]+", "-", f"{model.title}-{data.title}")
    return name if RUN_NAME.fullmatch(name) else f"run{name}"


@dataclass(frozen=True)
class Draft:
    """A tree as Hydra composes it, with references between its keys. Immutable: `replace` returns a changed copy."""

    tree: DictConfig

    @classmethod
    def of_run(cls, folder: RunFolder) -> "Draft":
        """The config.yaml of a run. Raises UserError: it is damaged or not the config of a run."""
        _, text = folder.saved_config()
        with explain_damage(folder.config_file, CONFIG_ADVICE):
            return cls.of_values(plain(OmegaConf.create(text)))

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> "Draft":
        """From the values of a saved config. Raises UserError: a run of 0.1 saved it."""
        if "loader" not in values:
            raise UserError(OF_0_1)
        return cls(OmegaConf.create(with_moved(values)))

    def has(self, key: str) -> bool:
        """Whether the tree has a dotted key, with or without a value."""
        node, name = self.owner(key), key.rpartition(".")[2]
        return isinstance(node, DictConfig) and name in list(node.keys())  # `name in node` is False for ???

    def owner(self, key: str) -> Any:
        """The node that contains a dotted key."""
        group = key.rpartition(".")[0]
        return OmegaConf.select(self.tree, group) if group else self.tree

    def get(self, key: str) -> Any:
        return plain(self.node(key))

    def node(self, key: str) -> Any:
        """A node with unresolved references. They resolve to keys of the tree that it is inserted into."""
        return OmegaConf.select(self.tree, key)

    def replace(self, values: Mapping[str, Any], merge: Collection[str] = (), without: Iterable[str] = ()) -> "Draft":
        """A copy with `values` at dotted keys. Values of keys in `merge` are merged; keys in `without` are removed."""
        tree = self.tree.copy()
        OmegaConf.set_struct(tree, False)
        for key, value in values.items():
            OmegaConf.update(tree, key, value, force_add=True, merge=key in merge)
        for group, _, name in (key.rpartition(".") for key in without):
            del OmegaConf.select(tree, group)[name]
        return Draft(tree)

    # The keys that locate a run. They are validated first.

    @property
    def run(self) -> str | None:
        return self.get("run")

    @property
    def runs_dir(self) -> str:
        return str(self.get("runs_dir"))

    @property
    def resume(self) -> str | None:
        return self.get("resume")

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.runs_dir) / str(self.run))

    @property
    def model_and_data(self) -> str:
        """The prefix of the run's default name."""
        model, data, task = (Component.of(self.group(name)) for name in ("model", "data", "task"))
        return name_prefix(model or task, data)

    def group(self, name: str) -> dict[str, Any]:
        """The values of a group, with unresolved references; empty if the group is invalid, which `values_of` reports."""
        node = raw_values(self.tree).get(name)
        return node if isinstance(node, dict) else {}


# --- Structure: a tree has exactly the groups, classes and keys that the engine reads ---

OF_0_1 = "this run was made by Lockstep 0.1. To continue, evaluate or export it, install lockstep==0.2. Its weights load with init_from=<its checkpoint> and lockstep.load_model."


@cache
def advice() -> dict[str, dict[str, str]]:
    """What to set instead of keys that Lockstep sets itself (`owned`), `keys` of other tools and unknown `options`."""
    table: dict[str, dict[str, str]] = yaml.load(Path(__file__).with_name("advice.yaml").read_bytes(), LOADER)
    return table


def structure_problems(draft: Draft) -> Iterator[str]:
    """Groups that are missing or have no keys, and classes that are missing from groups."""
    tree = raw_values(draft.tree)
    groups = [group for group in GROUPS if group not in RECIPES]
    if isinstance(tree.get("task"), dict) and "metrics" in tree["task"]:
        tree["task.metrics"] = tree["task"]["metrics"]
        groups.append("task.metrics")
    for group in groups:
        node = tree.get(group)
        yield from disallowed_targets(node, group)
        if not isinstance(node, Mapping):
            problem = f"{group}={to_text(node)} is invalid" if group in tree else f"{group} is missing"
            yield f"{problem}: the engine needs the keys of this group. Choose an option with {group}=<name>, or set single keys with {group}.<key>=<value>."
        elif group in (*SEVERAL, "task.metrics"):
            for name, each in node.items():
                yield from target_error(each, f"{group}.{name}")
        elif group not in CLOSED and (node or group not in OPTIONAL):
            yield from target_error(node, group)


def unknown_keys(draft: Draft) -> Iterator[str]:
    """Keys added with `+key=value` that nothing reads."""
    tree = raw_values(draft.tree)
    added = [str(key) for key in tree if key not in GROUPS]
    added += [f"{group}.{name}" for group in CLOSED if isinstance(tree.get(group), dict) for name in tree[group]]
    for key in (key for key in added if key not in KEYS):
        yield unknown_key(draft, key, "<value>")


def unknown_key(draft: Draft, key: str, value: str) -> str:
    """The error of a key that the config does not have, with the key to set instead."""
    group, leaf, keys = key.partition(".")[0], key.rpartition(".")[2], advice()["keys"]
    if reason := advice()["owned"].get(key):
        return f"{key} cannot be set: {reason}."
    if instead := keys.get(key) or (key not in KEYS and keys.get(leaf)):
        return f"{key} is not a key of this project. Pass {instead.format(value=value)}."
    if key in KEYS:
        return f"{key} is not a key of the chosen {group}. Remove it, or choose another {group} with {group}=<name>."
    parent, owner = key.rpartition(".")[0], draft.owner(key)
    names = [str(name) for name in owner if name != leaf] if isinstance(owner, DictConfig) else []
    if similar := nearest_key(key, [f"{parent}.{name}".lstrip(".") for name in names]):
        hint = f"did you mean {similar}? "
    else:
        hint = f"to add it as an argument of a class, pass +{key}=<value>; " if group in (*COMPONENTS, *SEVERAL) else ""
    return f"{key} is not a key of this project; {hint}{command('train')} --help lists all keys."


def nearest_key(key: str, neighbours: Iterable[str] = ()) -> str:
    """A key with a similar name in the same group, or with the same name in a similar group; empty if there is none."""
    group, _, name = key.rpartition(".")
    every = [each.rpartition(".") for each in dict.fromkeys((*neighbours, *KEYS, *GROUPS))]
    if close := get_close_matches(name, [leaf for parent, _, leaf in every if parent == group], 1):
        return f"{group}.{close[0]}".lstrip(".")
    same = [f"{parent}.{leaf}" for parent, _, leaf in every if leaf == name]
    return next(iter(get_close_matches(key, same, 1, cutoff=0.6 if group else 0)), "")


# --- The values of a tree ---


def value_errors(draft: Draft, keys: Iterable[str] | None = None) -> dict[str, str]:
    """The error of each of `keys` that is missing or invalid, except where the key that it refers to has the error.

    Without `keys`: of all keys, except those that only a class outside of Lockstep reads, and keys that refer to them. Its signature
    decides.
    """
    errors: dict[str, str] = {}
    for key in KEYS if keys is None else keys:
        node, (group, _, name) = draft.owner(key), key.rpartition(".")
        is_engines = group == "optim" and name in ENGINE[group]
        if draft.has(key):
            is_read = keys is not None or is_engines or is_shipped_node(node)
            errors[key] = (is_read and value_error(node, name, key, KEYS[key])) or ""
        elif isinstance(node, DictConfig) and (group in ("", *CLOSED) or name in NEEDED.get(group, ())):
            errors[key] = (
                f"{key} is missing from the config, and the engine needs it. For example, set {key}={KEYS[key].example}."
            )

    def is_reported(key: str) -> bool:
        reference = str(raw_values(draft.owner(key)).get(key.rpartition(".")[2]))[2:-1]
        return reference not in KEYS or (is_shipped_node(draft.owner(reference)) and not errors.get(reference))

    return {key: error for key, error in errors.items() if error and is_reported(key)}


def raw_values(node: DictConfig) -> dict[Any, Any]:
    """The values of a node, with unresolved references."""
    values: Any = OmegaConf.to_container(node)
    return values


def is_shipped_node(node: Any) -> bool:
    """Whether a node has no class, or a class that comes with Lockstep. True also for a value that is not a node."""
    values = raw_values(node) if isinstance(node, DictConfig) else {}
    return "_target_" not in values or Component.of(values).is_shipped


def value_error(node: DictConfig, name: str, key: str, kind: Validator) -> str | None:
    """The error of the value `name` of a node, or None if it is valid; `key` is its dotted key in the config."""
    if OmegaConf.is_missing(node, name):
        return f"{key} is missing; set {key}=<{name}>."
    try:
        value = plain(node[name])
    except InterpolationResolutionError:
        return f"{key}={raw_values(node)[name]} refers to a key that is not in the config. Set that key, or {key}."
    if kind.accepts(value):
        return None
    text = raw_values(node)[name]
    source = f"{to_text(value)}, from {text}," if value != text else to_text(value)
    return f"{key}={source} is invalid; expected {kind.takes}, for example {key}={kind.example}."


def values_of(draft: Draft) -> RunConfig:
    """The values of a draft. Raises UserError with all groups and keys that are missing, unknown, invalid, or name a class that no config may."""
    raise_problems([*structure_problems(draft), *unknown_keys(draft), *value_errors(draft).values()])
    try:
        return RunConfig.of(plain(draft.tree))
    except OmegaConfBaseException as e:  # in a key that only its class defines
        raise UserError(" ".join(str(e).split())) from None


def as_yaml(config: RunConfig) -> str:
    """The content of config.yaml."""
    return OmegaConf.to_yaml(OmegaConf.create(config.values))
