"""A config that is not judged yet: composed of a command line, or read back from a run. `values_of` makes values of it. Free of torch."""

import os
import re
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from lockstep.config.kinds import RUN_NAME, Kind
from lockstep.config.renames import renamed
from lockstep.config.run_config import CLOSED, SEVERAL, Component, Invalid, RunConfig
from lockstep.config.schema import GROUPS, KEYS, NEEDED, OPTIONAL, RECIPES
from lockstep.config.targets import unnamed
from lockstep.config.words import plain, shown
from lockstep.errors import UserError, did_you_mean
from lockstep.run import CONFIG_ADVICE, LOADER, RunFolder, told_if_damaged

# --- Names of runs and sweeps ---

SWEEP = "LOCKSTEP_SWEEP"


def stamp() -> str:
    """A timestamp and four random hex digits, so runs started in the same second get different names."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def sweep_name(run: object, env: MutableMapping[str, str] = os.environ) -> str:
    """The directory of a multirun. Kept in the environment for the sweep's other processes."""
    srun = env.get("SLURM_JOB_ID") if "SLURM_STEP_ID" in env else None
    ours = env.get("TORCHELASTIC_RUN_ID") or srun  # there, every process runs Hydra itself
    return env.setdefault(SWEEP, str(run or f"sweep-{ours or stamp()}"))


def restarted(env: Mapping[str, str] = os.environ) -> bool:
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


@dataclass(frozen=True)
class Draft:
    """A tree as Hydra composes it, with references between its keys. Nobody changes one: `but` makes another."""

    tree: DictConfig
    drawn: frozenset[str] = frozenset()  # keys that this process has drawn, which others would draw differently

    @classmethod
    def of_run(cls, folder: RunFolder) -> "Draft":
        """The config.yaml of a run. Raises UserError: it is damaged, or something else."""
        values, text = folder.saved_config()
        with told_if_damaged(folder.config_file, CONFIG_ADVICE):
            tree: Any = OmegaConf.create(text)
            if any(part not in values for part in WHOLE):
                raise ValueError("it is not the whole config of a run")
        return cls.of_values(plain(tree))

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> "Draft":
        """Of a saved config, of any version."""
        return cls(OmegaConf.create(renamed(values)))

    def has(self, key: str) -> bool:
        """Whether the tree has a dotted key, also one without a value."""
        node, name = self.owner(key), key.rpartition(".")[2]
        return isinstance(node, DictConfig) and name in list(node.keys())  # `in` denies those that are ???

    def owner(self, key: str) -> Any:
        """The node that has a dotted key."""
        group = key.rpartition(".")[0]
        return OmegaConf.select(self.tree, group) if group else self.tree

    def get(self, key: str, default: Any = None) -> Any:
        return plain(self.node(key, default))

    def node(self, key: str, default: Any = None) -> Any:
        """A group with the references in it, which then lead to keys of the tree that takes it."""
        return OmegaConf.select(self.tree, key, default=default)

    def but(self, values: Mapping[str, Any], merge: Collection[str] = (), without: Collection[str] = ()) -> "Draft":
        """With other values of dotted keys, those of `merge` merged with what is there, and without some."""
        tree = self.tree.copy()
        OmegaConf.set_struct(tree, False)
        for key, value in values.items():
            OmegaConf.update(tree, key, value, force_add=True, merge=key in merge)
        for group, _, name in (key.rpartition(".") for key in without):
            del OmegaConf.select(tree, group)[name]
        return Draft(tree)

    # The keys by which a run is found, which are judged first.

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
    def init_from(self) -> str | None:
        return self.get("init_from")

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.runs_dir) / str(self.run))

    @property
    def model_and_data(self) -> str:
        """What the name of a run begins with."""
        model, data, task = (Component.of(self.group(name)) for name in ("model", "data", "task"))
        name = re.sub(r"[^\w.+-]+", "-", f"{(model or task).title}-{data.title}")
        return name if RUN_NAME.fullmatch(name) else f"run{name}"

    def group(self, name: str) -> dict[str, Any]:
        """The values of a group; none of one that is wrong, which `values_of` says."""
        try:
            node = self.get(name)
        except OmegaConfBaseException:
            return {}
        return node if isinstance(node, dict) else {}

    def identified(self, experiment: str | None = None) -> "Draft":
        """With a name, a seed and the loggers' ids; the experiment among their tags."""
        drawn: dict[str, Any] = {}
        if self.run is None:
            drawn["run"] = f"{self.model_and_data}-{stamp()}"
        if self.get("seed") is None:
            drawn["seed"] = secrets.randbelow(2**31)
        for name, logger in ((name, node) for name, node in self.group("logger").items() if isinstance(node, dict)):
            if "id" in logger and logger["id"] is None:
                drawn[f"logger.{name}.id"] = secrets.token_hex(4)
            if experiment and "auto" in (tags := logger.get("tags") or ()) and experiment not in tags:
                drawn[f"logger.{name}.tags"] = [experiment, *tags]
        trainer = self.group("trainer")
        if trainer.get("max_steps") == -1 and trainer.get("max_epochs", 1) is None:
            drawn["trainer.max_epochs"] = 1
        return Draft(self.but(drawn).tree, frozenset(drawn))


# --- Whether a tree has the groups, classes and keys that the engine reads, and no others ---

# Every config of a run has these.
WHOLE = ("run", "seed", "data", "augment", "strategy", "trainer", "checkpoint", "exact")


@cache
def advice() -> dict[str, dict[str, str]]:
    """What to type in place of keys that Lockstep sets itself (`owned`), of `keys` of other tools, and of unknown `options` by group."""
    table: dict[str, dict[str, str]] = yaml.load(Path(__file__).with_name("advice.yaml").read_text(), LOADER)
    return table


def missing_keys(draft: Draft, group: str = "") -> Iterator[str]:
    """Keys of a group that the engine reads and that are not there; of "", those outside of groups."""
    for key, kind in KEYS.items():
        within, _, name = key.rpartition(".")
        if within == group and (group in ("", *CLOSED) or name in NEEDED.get(group, ())) and not draft.has(key):
            yield f"{key} is not in the config, and the engine reads it. For example: {key}={kind.example}."


def structure_problems(draft: Draft) -> Iterator[str]:
    """Groups that are missing or hold no keys; classes and keys that are missing in them."""
    yield from missing_keys(draft)
    for group in (name for name in GROUPS if name not in RECIPES):
        try:
            node: Any = draft.tree.get(group)
            node = OmegaConf.to_container(node) if isinstance(node, DictConfig) else node
        except OmegaConfBaseException as e:  # it refers to what there is not
            node = str(e).partition("\n")[0]
        if not isinstance(node, Mapping):
            there = f"{group}={shown(node)} is invalid" if draft.has(group) else f"{group} is not in the config"
            yield f"{there}: the engine reads the keys of this group. Choose an option, {group}=<name>, or set single keys, {group}.<key>=<value>."
        elif group in CLOSED:
            yield from missing_keys(draft, group)
        elif group in SEVERAL:
            yield from named_nodes(node, group)
        elif node or group not in OPTIONAL:
            yield from unnamed(node, group)
            yield from missing_keys(draft, group)
            if group == "task" and "metrics" in node:
                yield from named_nodes(node["metrics"], "task.metrics")


def named_nodes(nodes: Any, key: str) -> Iterator[str]:
    """Problems of a group of named nodes, such as `callbacks`."""
    if not isinstance(nodes, Mapping):
        yield f"{key}={shown(nodes)} is invalid: it holds classes by name. For example: {key}={{}}."
        return
    for name, node in nodes.items():
        yield from unnamed(node, f"{key}.{name}")


def unknown_keys(draft: Draft) -> Iterator[str]:
    """Keys added with `+key=value` that nothing reads."""
    for group in ("", *CLOSED):
        node: Any = draft.tree.get(group) if group else draft.tree
        known = [*(key for key in KEYS if key.rpartition(".")[0] == group), *(() if group else GROUPS)]
        for key in (f"{group}.{name}".lstrip(".") for name in map(str, node if isinstance(node, DictConfig) else ())):
            if key not in known and (why := advice()["owned"].get(key)):
                yield f"{key} cannot be set: {why}."
            elif key not in known:
                yield f"{key} is not a key of this project{did_you_mean(key, known)}."


# --- The values of a tree ---


def wrong_values(draft: Draft, keys: Iterable[str] | None = None) -> dict[str, str]:
    """Why `keys` have wrong values; no reason where the key that one refers to is to blame. Without `keys`: of all, except those of a class
    of the user's, whose signature decides, and those that refer to them."""
    wrong: dict[str, str] = {}
    refers: dict[str, str] = {}
    for key in KEYS if keys is None else keys:
        node, name = draft.owner(key), key.rpartition(".")[2]
        if not draft.has(key) or (keys is None and not is_ours(node)):
            continue
        if why := problem_of(node, name, key, KEYS[key]):
            refers[key] = str(written(node).get(name))[2:-1]
            if refers[key] not in KEYS or is_ours(draft.owner(refers[key])):
                wrong[key] = why
    return {key: "" if refers[key] in wrong else why for key, why in wrong.items()}


def written(node: DictConfig) -> dict[Any, Any]:
    """The values of a node, with references as they are written."""
    values: Any = OmegaConf.to_container(node)
    return values


def is_ours(node: Any) -> bool:
    """Whether a node is a group without a class, or names one that comes with Lockstep; also what is none."""
    return (
        not isinstance(node, DictConfig)
        or "_target_" not in (values := written(node))
        or Component.of(values).is_shipped
    )


def problem_of(node: DictConfig, name: str, key: str, kind: Kind) -> str | None:
    """The problem of the value `name` of a node, if there is one; `key` is its place in the config."""
    if OmegaConf.is_missing(node, name):
        return f"{key} is missing; set {key}=<{name}>."
    text = written(node)[name]
    try:
        value = plain(node[name])
    except InterpolationResolutionError:
        return f"{key}={text} refers to a key that is not in the config. Set that key, or {key}."
    if kind.accepts(value):
        return None
    given = f"{shown(value)}, from {text}," if value != text else shown(value)
    return f"{key}={given} is invalid; expected {kind.takes}, for example {key}={kind.example}."


def values_of(draft: Draft) -> tuple[RunConfig, list[str]]:
    """The values of a draft, and what is wrong with them: a wrong value is Invalid, so no rule judges it.

    Raises:
        UserError: a group or a key is missing, so there are no values; with all other problems.
    """
    structure, wrong = list(structure_problems(draft)), wrong_values(draft)
    found = [*structure, *unknown_keys(draft), *filter(None, wrong.values())]
    if structure:
        raise UserError(*found)
    try:
        tree = plain(draft.but(dict.fromkeys(wrong)).tree)
    except OmegaConfBaseException as e:  # of a key that only its class knows
        raise UserError(*found, " ".join(str(e).split())) from None
    for key in wrong:
        *path, name = key.split(".")
        node = tree
        for part in path:
            node = node[part]
        node[name] = Invalid()
    return RunConfig.of(tree), found


def as_yaml(config: RunConfig) -> str:
    """What config.yaml says."""
    return OmegaConf.to_yaml(OmegaConf.create(config.plain()))
