"""Every check of a config, across its groups, without torch: reports all mistakes together."""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from lockstep.config.batches import accumulated, auto_problems, batch_problems, fold_problems
from lockstep.config.instantiate import operation_problems
from lockstep.config.rules import (
    device_problems,
    environment_problems,
    exact_problems,
    length_problems,
    process_problems,
    task_problems,
)
from lockstep.config.schema import CLOSED, GROUPS, KEYS, NEEDED, OPTIONAL, RECIPES, SEVERAL, Kind
from lockstep.config.targets import is_shipped
from lockstep.config.words import plain, shown
from lockstep.errors import did_you_mean
from lockstep.machine.world import World, accelerator_of, spec_of, world_of

# --- Whether a config has the groups, classes and keys that the engine reads. Free of torch ---

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


# --- Every check of a config, across its groups, without torch: reports all mistakes together ---

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


def unknown_keys(cfg: DictConfig) -> Iterator[str]:
    """Keys added with `+key=value` that nothing reads."""
    top = [key for key in KEYS if "." not in key] + list(GROUPS)
    for key in map(str, cfg):
        if key not in top:
            yield f"{key} is not a key of this project{did_you_mean(key, top)}."
    for group in CLOSED:
        known = [key for key in KEYS if key.startswith(f"{group}.")]
        for name in cfg[group] if isinstance(cfg.get(group), DictConfig) else ():
            key = f"{group}.{name}"
            if key in OWNED:
                yield f"{key} cannot be set: {OWNED[key]}."
            elif key not in known:
                yield f"{key} is not a key of this project{did_you_mean(key, known)}."


def wrong_values(cfg: DictConfig, keys: Iterable[str] | None = None) -> Iterator[str]:
    """Problems of `keys`. Without them: of all KEYS, except those of a class of the user's, whose signature decides."""
    for key in KEYS if keys is None else keys:
        group, _, name = key.rpartition(".")
        inside = isinstance(cfg.get(group.partition(".")[0]), DictConfig)
        node = OmegaConf.select(cfg, group) if inside else cfg if not group else None
        if not isinstance(node, DictConfig) or name not in list(node.keys()):  # `in` denies missing ones
            continue
        if keys is None and "_target_" in node and not is_shipped(node):
            continue
        yield from problem_of(node, name, key, KEYS[key])


def problem_of(node: DictConfig, name: str, key: str, kind: Kind) -> Iterator[str]:
    """The problem of the value `name` of a node, if there is one; `key` is its place in the config."""
    if OmegaConf.is_missing(node, name):
        yield f"{key} is missing; type {key}=<{name}>."
        return
    written = OmegaConf.to_container(node, resolve=False)[name]  # type: ignore[index, call-overload]
    try:
        value = plain(node[name])
    except InterpolationResolutionError:
        yield f"{key}={written} refers to a key that is not in the config. Set that key, or {key}."
        return
    refers = KEYS.get(written[2:-1]) if OmegaConf.is_interpolation(node, name) else None
    if not kind.accepts(value) and (refers is None or refers.accepts(value)):  # else that key is told
        given = f"{shown(value)}, from {written}," if value != written else shown(value)
        yield f"{key}={given} is not possible; it takes {kind.takes}. Type for example {key}={kind.example}."


def loading_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    on_device, workers = cfg.data.get("on_device"), cfg.data.get("num_workers")
    if on_device is True and world.accelerator == "cpu":
        yield "data.on_device=true has no effect on a CPU: the samples are in its memory already. Type data.on_device=auto."
    if on_device is True and workers not in (0, "auto"):
        yield f"data.on_device=true leaves nothing for data.num_workers={workers} to load. Leave one of them out."
    for key in ("prefetch_factor", "persistent_workers"):
        if cfg.data.get(key) is not None and workers in (0, "auto"):
            yield f"data.{key}={shown(cfg.data[key])} has no effect without workers. Type data.num_workers=2 as well, or leave it out."


def fused_problem(cfg: DictConfig) -> str | None:
    """Why the optimizer cannot be fused: the second half of a sentence that starts with `optim.fused=true`."""
    if cfg.exact.shards and accelerator_of(str(cfg.trainer.accelerator)) == "cpu":
        return None  # training/arithmetic.py
    if cfg.exact.shards and spec_of(cfg.strategy).is_sharded:
        return f"was not tried on shards of GPUs, so exact.shards={cfg.exact.shards} is not possible"
    if not str(cfg.optim.get("_target_")).endswith("SGD"):
        return None
    if spec_of(cfg.strategy).is_sharded:
        return f"has no kernel for SGD on the shards of strategy={cfg.strategy.name} (torch 2.13)"
    if any(node.get("unfreeze") for node in cfg.callbacks.values()):
        return "has no kernel for SGD where some parameters have no momentum yet, as with callbacks.freeze.unfreeze (torch 2.13)"
    return None


def strategy_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    precision, name, possible = str(cfg.trainer.precision), world.strategy, spec_of(cfg.strategy).precisions
    if precision in ("16-mixed", "16-true", "16") and world.accelerator == "cpu":
        yield f"trainer.precision={precision} is not supported on a CPU. Type trainer.precision=bf16-mixed."
    if possible and precision not in ("auto", "32", *possible):
        yield f"strategy={name} does not support trainer.precision={precision}; it takes one of {', '.join(possible)}. Type trainer.precision=bf16-mixed."
    if world.accelerator == "mps" and precision in ("64-true", "64"):
        yield "trainer.precision=64-true is not supported on mps. Type trainer.precision=32-true."
    yield from without_effect(cfg, world).values()


def without_effect(cfg: DictConfig, world: World) -> dict[str, str]:
    """Keys that do nothing under the strategy or on the device, each with what to say. Flags, or names that null takes away."""
    spec, under, found = spec_of(cfg.strategy), f"has no effect under strategy={world.strategy}", dict[str, str]()
    if cfg.tf32 and world.accelerator != "cuda":
        found["tf32"] = f"has no effect on {world.accelerator}: only NVIDIA GPUs have it. Type tf32=false."
    if cfg.trainer.sync_batchnorm and spec.splits_batches:
        found["trainer.sync_batchnorm"] = f"{under}: each replica normalises its own part. Type strategy=ddp."
    if cfg.compile and spec.splits_batches:
        found["compile"] = f"{under}: all replicas would run on the first device. Type strategy=ddp."
    if cfg.checkpoint.sharded and not spec.is_sharded:
        choice = "Type strategy=fsdp, or checkpoint.sharded=false."
        found["checkpoint.sharded"] = f"{under}: nothing is sharded there. {choice}"
    if cfg.strategy.get("comm_hook") and world.accelerator != "cuda":
        found["strategy.comm_hook"] = "has no effect without GPUs. Type strategy.comm_hook=null."
    return {key: f"{key}={shown(OmegaConf.select(cfg, key))} {why}" for key, why in found.items()}


def training_problems(cfg: DictConfig, _: World) -> Iterator[str]:
    if cfg.optim.get("fused") is True and (why := fused_problem(cfg)):
        yield f"optim.fused=true {why}. Leave optim.fused out."
    if cfg.optim.get("nesterov") is True and not cfg.optim.get("momentum") and is_shipped(cfg.optim):
        yield "optim.nesterov=true needs a momentum above 0. Type optim.momentum=0.9, or optim.nesterov=false."
    if cfg.optim.get("no_decay") is True and is_shipped(cfg.optim) and not cfg.optim.get("weight_decay"):
        yield "optim.no_decay=true has no effect with optim.weight_decay=0. Leave it out, or type optim.weight_decay=0.05."
    trainer = cfg.trainer
    accumulate = accumulated(cfg)
    for key in ("limit_train_batches", "val_check_interval"):
        count = trainer[key]
        share = isinstance(count, float) and accumulate > 1 and key == "limit_train_batches"
        if share or (isinstance(count, int) and count % accumulate):
            yield (
                f"trainer.{key}={count} counts micro-batches and must be whole steps of {accumulate}. "
                f"Type trainer.{key}={accumulate * max(1, int(count) // accumulate)}."
            )
    modes = {cfg.task.monitor: cfg.task.mode, "val/loss": "min", None: cfg.checkpoint.mode}
    if (good := modes.get(cfg.checkpoint.monitor, cfg.checkpoint.mode)) != cfg.checkpoint.mode:
        yield f"checkpoint.monitor={cfg.checkpoint.monitor} with checkpoint.mode={cfg.checkpoint.mode} would keep the worst checkpoint. Type checkpoint.mode={good}."
    watching = {k: node for k, node in cfg.callbacks.items() if "monitor" in node and is_shipped(node)}
    for name, node in watching.items():
        if trainer.limit_val_batches == 0:
            yield f"callbacks=[{name}] has no effect with trainer.limit_val_batches=0: nothing is validated. Leave one of them out."
        if node.monitor is None:
            yield f"callbacks=[{name}] needs a figure to watch, and callbacks.{name}.monitor is null. Type checkpoint.monitor=<a figure of the validation>."
    if trainer.gradient_clip_algorithm and trainer.gradient_clip_val is None:
        yield f"trainer.gradient_clip_algorithm={trainer.gradient_clip_algorithm} has no effect alone. Type trainer.gradient_clip_val=1.0 as well."
    if not trainer.enable_checkpointing and cfg.checkpoint.every_n_steps:
        yield "checkpoint.every_n_steps has no effect with trainer.enable_checkpointing=false. Leave one of them out."
    if not trainer.enable_checkpointing and not cfg.checkpoint.background:
        yield "checkpoint.background=false has no effect with trainer.enable_checkpointing=false. Leave one of them out."
    pretrained, path = cfg.model.get("pretrained"), cfg.model.get("checkpoint_path")
    if cfg.init_from and (pretrained or path):
        yield "init_from and model.pretrained or model.checkpoint_path both name weights to start from. Leave one of them out."
    if is_shipped(cfg.model) and path and not Path(path).expanduser().is_file():
        yield f"model.checkpoint_path={path} does not exist. Name a file of weights (.safetensors or .pth)."
    if trainer.limit_train_batches == 0:
        yield "trainer.limit_train_batches=0 trains nothing. To evaluate a run, use eval in place of train, with run=<name>."


def data_set_problems(cfg: DictConfig, world: World) -> Iterator[str]:
    """Asks Lockstep's own data sets, which import no torch; others are asked when they are created."""
    module, name = str(cfg.data.get("_target_")).rpartition(".")[::2]
    if module.startswith("lockstep.data"):
        yield from loading_problems(cfg, world)
        data_set = getattr(importlib.import_module(module), name, None)
        yield from data_set.problems(plain(cfg.data)) if data_set else ()


BOTH = (device_problems, strategy_problems, data_set_problems)
EVALUATION = (*BOTH, process_problems)
TRAINING = (
    *BOTH,
    exact_problems,
    operation_problems,
    batch_problems,
    auto_problems,
    task_problems,
    training_problems,
    length_problems,
    fold_problems,
    environment_problems,
)


def check(cfg: DictConfig, *, evaluating: bool = False) -> list[str]:
    """All problems of a composed config; an empty list when it can run. Reads no data and imports no torch."""
    structure = list(structure_problems(cfg))
    problems = [*structure, *unknown_keys(cfg), *wrong_values(cfg)]
    if structure:  # the other checks read these keys
        return problems
    for cross_check in EVALUATION if evaluating else TRAINING:
        try:
            problems += cross_check(cfg, world_of(cfg))
        except (TypeError, ValueError, ArithmeticError, OmegaConfBaseException):
            if not problems:  # otherwise a value that is already reported caused it
                raise
    return problems
