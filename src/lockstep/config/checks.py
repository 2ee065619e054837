"""Every check of a config without torch, whose problems are reported together, and those that need the classes of the user."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config import rules
from lockstep.config.instantiate import (
    ENGINE,
    ENGINE_DATA,
    SPECIAL,
    data_set_problems,
    not_its_own,
    not_taken,
    problems,
    to_plain,
)
from lockstep.config.schema import CLOSED, GROUPS, KEYS, NEEDED, OPTIONAL, RECIPES, SEVERAL, is_shipped, wrong_values
from lockstep.config.settings import Settings
from lockstep.config.targets import foreign_names, target_of, unnamed, written_arguments
from lockstep.config.words import shown
from lockstep.errors import UserError, did_you_mean
from lockstep.run import LOADER

# --- Whether a config has the groups, classes and keys that the engine reads, and no others ---

TRAINED = ("train/loss", "train/lr")  # what the training of every task logs
MEASURED = ("_per_s", "_memory_gib")  # endings of metrics that depend on the data's unit or on the device


@cache
def advice() -> dict[str, dict[str, str]]:
    """What to type in place of keys that Lockstep sets itself (`owned`), of `keys` of other tools, and of unknown `options` by group."""
    table: dict[str, dict[str, str]] = yaml.load(Path(__file__).with_name("advice.yaml").read_text(), LOADER)
    return table


def missing_keys(node: Mapping[Any, Any], group: str = "") -> Iterator[str]:
    """Keys of a group that the engine reads and that are not in its node; of "", those outside of groups."""
    names = [str(name) for name in node.keys()]  # noqa: SIM118  # `in` denies those that are ???
    for key, kind in KEYS.items():
        within, _, name = key.rpartition(".")
        if within == group and name not in names and (group in ("", *CLOSED) or name in NEEDED.get(group, ())):
            yield f"{key} is not in the config, and the engine reads it. For example: {key}={kind.example}."


def structure_problems(cfg: DictConfig) -> Iterator[str]:
    """Groups that are missing or hold no keys; classes and keys that are missing in them."""
    yield from missing_keys(cfg)
    for group in (name for name in GROUPS if name not in RECIPES):
        try:
            node: Any = cfg.get(group)
            node = OmegaConf.to_container(node) if isinstance(node, DictConfig) else node
        except OmegaConfBaseException as e:  # it refers to what there is not
            node = str(e).partition("\n")[0]
        if not isinstance(node, Mapping):
            there = f"{group}={shown(node)} is invalid" if group in cfg else f"{group} is not in the config"
            yield f"{there}: the engine reads the keys of this group. Choose an option, {group}=<name>, or set single keys, {group}.<key>=<value>."
        elif group in CLOSED:
            yield from missing_keys(node, group)
        elif group in SEVERAL:
            yield from named_nodes(node, group)
        elif node or group not in OPTIONAL:
            yield from unnamed(node, group)
            if group != "data" or is_shipped(node):  # other data is asked once its class is imported
                yield from missing_keys(node, group)
            if group == "task" and "metrics" in node:
                yield from named_nodes(node["metrics"], "task.metrics")


def named_nodes(nodes: Any, key: str) -> Iterator[str]:
    """Problems of a group of named nodes, such as `callbacks`."""
    if not isinstance(nodes, Mapping):
        yield f"{key}={shown(nodes)} is invalid: it holds classes by name. For example: {key}={{}}."
        return
    for name, node in nodes.items():
        yield from unnamed(node, f"{key}.{name}")


def unknown_keys(cfg: DictConfig) -> Iterator[str]:
    """Keys added with `+key=value` that nothing reads."""
    closed = {group: cfg[group] for group in CLOSED if isinstance(cfg.get(group), DictConfig)}
    for group, node in {"": cfg, **closed}.items():
        known = [*(key for key in KEYS if key.rpartition(".")[0] == group), *(() if group else GROUPS)]
        for key in (f"{group}.{name}".lstrip(".") for name in node):
            if key not in known and (why := advice()["owned"].get(key)):
                yield f"{key} cannot be set: {why}."
            elif key not in known:
                yield f"{key} is not a key of this project{did_you_mean(key, known)}."


# --- Signatures ---


def class_nodes(cfg: DictConfig) -> dict[str, Any]:
    """The nodes that name classes, by their keys. Without `data`."""
    nodes: dict[str, Any] = {key: cfg[key] for key in ("task", "model", "strategy", "optim", "schedule") if cfg[key]}
    for key, group in (("task.metrics", cfg.task.get("metrics")), ("callbacks", cfg.callbacks), ("logger", cfg.logger)):
        nodes |= {f"{key}.{name}": node for name, node in (group or {}).items()}
    return nodes


def unread_arguments(cfg: DictConfig) -> Iterator[str]:
    """Keys without a Kind that a shipped class does not take. Its source is read, because it takes seconds to import.

    Beside classes of the user's, `check_classes` reports them, with the keys of those.
    """
    nodes = class_nodes(cfg)
    for key, node in nodes.items() if all(map(is_shipped, (*nodes.values(), cfg.data))) else ():
        left_out = (*SPECIAL, *ENGINE.get(key, ()))
        asked = [name for name in node if name not in left_out and f"{key}.{name}" not in KEYS]
        known = written_arguments(node._target_) if asked and is_shipped(node) else None
        yield from not_taken(node._target_, key, asked, known) if known is not None else ()


def signature_problems(settings: Settings, *, shipped: bool) -> Iterator[str]:
    """Keys that a class of the user's does not take, and of the `shipped` ones too, which take seconds to import. Without `data`."""
    nodes = class_nodes(settings.cfg)
    nodes |= {"optim": settings.optimizer_node} if "optim" in nodes else {}
    for key, node in nodes.items():
        if shipped or not is_shipped(node):
            from lockstep.compat import others  # noqa: F401  # before Lightning

            yield from problems(to_plain(node), key)


# --- The classes of data and task ---


def data(settings: Settings) -> Iterator[str]:
    """The keys of `data`, by its class. Lockstep's own data sets import no torch; adapters of other libraries wait."""
    node = to_plain(settings.cfg.data)
    if not settings.imported and not str(node["_target_"]).startswith("lockstep.data."):
        return
    if not settings.own_loaders:
        yield from data_set_problems(node)
        if "batch_size" not in node:
            yield "data.batch_size is missing: it is the global batch of one optimizer step. Set +data.batch_size=64."
        if not is_shipped(node):
            yield from wrong_values(settings.cfg, [f"data.{key}" for key in ENGINE_DATA])
        return
    if (
        len(left := not_its_own(node)) > 2
    ):  # of the data set that was chosen before; one sentence instead of one for each
        yield f"data._target_={node['_target_']} is a LightningDataModule, and takes no {', '.join(left)}. Pass data=none data._target_={node['_target_']}, and its own arguments as +data.<name>=<value>."
        return
    yield from problems(node, "data")
    if settings.operations:
        yield f"augment.{next(iter(settings.operations))} has no effect: {node['_target_']} makes its own batches. Set augment=none."
    if settings.knows("task") and not settings.custom_module:
        yield (
            f"task={settings.title('task')} needs a data set that describes itself; data={settings.title('data')} is a LightningDataModule with its own dataloaders. "
            "Write a lockstep.data.DataSet, or use a LightningModule as the task."
        )
    if settings.cfg.trainer.accumulate_grad_batches == "auto":
        yield f"trainer.accumulate_grad_batches=auto divides Lockstep's batches, but data={settings.title('data')} makes its own. Set a number."
    if node.get("num_workers") == "auto":
        yield f"data.num_workers=auto is for Lockstep's dataloaders, but data={settings.title('data')} has its own. Set a number."


def task(settings: Settings) -> Iterator[str]:
    cfg = settings.cfg
    if not is_shipped(cfg.task) and cfg.checkpoint.monitor and cfg.checkpoint.mode not in ("max", "min"):
        yield f"checkpoint.mode={cfg.checkpoint.mode} is invalid; expected one of max, min. Set checkpoint.mode=min."
    yield from (own_module if settings.custom_module else own_task)(settings)


def own_task(settings: Settings) -> Iterator[str]:
    """Of a Task."""
    cfg = settings.cfg
    if not settings.knows("task"):
        return
    added = cfg.task.get("metrics") or ()
    for name in sorted({"loss", "count"} & set(added)):
        yield f"task.metrics.{name}: every task already logs {name}. Use another name."
    for group in [group for group in ("model", "optim", "schedule") if not cfg[group]]:
        yield (
            f"{group}=none is for a LightningModule with its own {group}; task={settings.title('task')} is a Task, which needs one. Choose it with "
            f"{group}=<name>{', or set task=own instead of task=lightning_module' if 'replaces' in cfg.task else ''}."
        )
    if not is_shipped(cfg.task) and getattr(target_of(cfg.task._target_, "task"), "between_samples", False):
        yield from whole_batch_problems(settings)


def own_module(settings: Settings) -> Iterator[str]:
    """Groups and keys that a LightningModule as the task does not use."""
    cfg, name = settings.cfg, settings.title("task")
    if groups := [group for group in ("model", "optim", "schedule") if cfg[group]]:
        options = [f"{group}=none" for group in groups] if "replaces" in cfg.task else ["task=lightning_module"]
        yield f"{', '.join(groups)} would have no effect: {cfg.task._target_} has its own. Set {' '.join(options)}, or begin its config with defaults: [lightning_module]."
    for operation in (key for key, each in settings.operations.items() if getattr(each, "mixes", False)):
        yield f"augment.{operation} mixes the losses of two targets, which a task computes and {name} does not. Remove it: ~augment.{operation}."
    if cfg.task.get("metrics"):
        yield f"task.metrics has no effect: {name} logs its own metrics. Remove it."
    if settings.spec.is_sharded:
        own = f"needs an optimizer of the group optim with strategy={cfg.strategy.name}, and {name} makes its own. Set strategy=ddp"
        yield from settings.excluded({"exact.logical_ranks": (None, own)})
    if settings.spec.splits_batches:
        yield f"strategy={cfg.strategy.name} changes how a task's network is called; {name} calls its own. Set strategy=ddp."


def whole_batch_problems(settings: Settings) -> Iterator[str]:
    """What divides the global batch of a task that compares its samples (`Task.between_samples`)."""
    why = f"task={settings.title('task')} compares the samples of a batch (between_samples)"
    cfg, given = settings.cfg, settings.cfg.trainer.accumulate_grad_batches
    if cfg.exact.logical_ranks:
        yield f"exact.logical_ranks={cfg.exact.logical_ranks} divides the global batch into logical ranks, but {why}. Remove it."
    elif given != 1:
        yield (
            f"trainer.accumulate_grad_batches={given} divides the global batch into micro-batches, but {why}. "
            "Set trainer.accumulate_grad_batches=1; if memory runs out, use more processes or a smaller data.batch_size."
        )


def monitor_problems(settings: Settings, metrics: list[str]) -> Iterator[str]:
    """Monitored metrics that nothing logs. The metrics of callbacks that are not Lockstep's are known only when the run logs them."""
    cfg = settings.cfg
    first = "task.monitor" if cfg.task.get("monitor") == cfg.checkpoint.monitor else "checkpoint.monitor"
    monitors = {first: cfg.checkpoint.monitor}
    monitors |= {f"callbacks.{name}.monitor": node.get("monitor") for name, node in cfg.callbacks.items()}
    own = all(str(node.get("_target_")).startswith("lockstep.") for node in cfg.callbacks.values())
    for key, monitor in monitors.items():
        of_callback = key != first
        if monitor is None or (of_callback and monitor == cfg.checkpoint.monitor):  # told once
            continue
        monitor = str(monitor)
        names = [*(f"val/{metric}" for metric in ("loss", *metrics)), *(TRAINED if of_callback else ())]
        known = any(monitor == name or (name.endswith("/*") and monitor.startswith(name[:-1])) for name in names)
        later = of_callback and not monitor.startswith("val/") and (not own or monitor.endswith(MEASURED))
        if not known and not later:
            yield f"{key}={monitor}: the {'run' if of_callback else 'validation'} logs {', '.join(names)}{did_you_mean(monitor, names)}. Set one of them, or add it to task.metrics."


# --- What is known only once the data is prepared ---


def step_problems(settings: Settings, samples: int) -> Iterator[str]:
    """Limits that a run of so many training samples per epoch does not reach."""
    trainer, plan = settings.cfg.trainer, settings.steps
    every = trainer.val_check_interval
    batches, total = plan.epoch(samples), plan.steps(samples)
    if not batches:
        yield f"trainer.limit_train_batches={trainer.limit_train_batches} leaves nothing of an epoch to train. Set a larger number."
        return
    warmup = settings.cfg.schedule.get("warmup_steps")
    if isinstance(warmup, int) and warmup >= total:
        yield f"schedule.warmup_steps={warmup} must be below the run's {total:g} steps. Set a smaller number."
    if trainer.min_epochs and trainer.min_epochs * (batches // plan.accumulate) > total:
        yield f"trainer.min_epochs={trainer.min_epochs} is more than the run's {total:g} steps allow. Set a smaller number."
    if trainer.min_steps and trainer.min_steps > total:
        yield f"trainer.min_steps={trainer.min_steps} is more than the run's {total:g} steps. Set a smaller number, or trainer.max_epochs=<more>."
    if isinstance(every, int) and every > batches and trainer.check_val_every_n_epoch is not None:
        yield (
            f"trainer.val_check_interval={every} is more than the {batches} batches of an epoch. Set a smaller number, "
            "or trainer.check_val_every_n_epoch=null to count over epochs."
        )


# --- All of them ---

EVALUATION = (rules.devices, rules.strategy, data, rules.loading, task, rules.processes)
TRAINING = (
    *EVALUATION,
    rules.exact_training,
    rules.images,
    rules.division,
    rules.accumulation,
    rules.optimizer,
    rules.checkpoints,
    rules.length,
)


def check(cfg: DictConfig, *, evaluating: bool = False, with_data: bool = True) -> list[str]:
    """All problems of a composed config that need neither torch nor the user's classes; an empty list without any. Reads no data."""
    structure, wrong = list(structure_problems(cfg)), list(wrong_values(cfg))
    found = [*structure, *unknown_keys(cfg), *wrong]
    if structure:  # the rules read these keys
        return found
    for group in GROUPS:
        found += foreign_names(to_plain(cfg[group]), group) if isinstance(cfg.get(group), DictConfig) else ()
    try:
        settings = Settings.of(cfg, imported=False)
    except BUGS:
        if not wrong:  # otherwise a value that is already reported caused it
            raise
        return found
    found += unread_arguments(cfg)
    return broken_rules(settings, found, evaluating=evaluating, with_data=with_data)


def check_classes(settings: Settings, *, evaluating: bool = False, shipped: bool = False) -> list[str]:
    """The problems that `check` cannot see: imports the user's classes, checks their signatures, and applies the rules to them.

    The signatures of the `shipped` classes, which take seconds to import, are looked at only on demand.
    """
    found = [] if evaluating else list(signature_problems(settings, shipped=shipped))  # what has trained is right
    return broken_rules(settings, found, evaluating=evaluating)


BUGS = (TypeError, ValueError, ArithmeticError, OmegaConfBaseException)
Rule = Callable[[Settings], Iterator[str]]


def broken_rules(settings: Settings, found: list[str], *, evaluating: bool, with_data: bool = True) -> list[str]:
    """`found` and the problems of the rules. A rule may fail for a value that has been reported."""
    for rule in EVALUATION if evaluating else TRAINING:
        try:
            found += rule(settings) if with_data or rule is not data else ()
        except UserError as e:
            found += e.problems
        except BUGS:
            if not found or is_bug(rule, settings):
                raise
    return list(dict.fromkeys(found))


def is_bug(rule: Rule, settings: Settings) -> bool:
    """Whether a rule fails with an example in place of each wrong or missing value as well."""
    cfg = settings.cfg.copy()
    OmegaConf.set_struct(cfg, False)
    wrong = [key for key in KEYS if any(wrong_values(cfg, [key]))] + ["data.batch_size"] * (
        "batch_size" not in cfg.data
    )
    cfg.merge_with_dotlist([f"{key}={KEYS[key].example}" for key in wrong])
    try:
        list(rule(Settings.of(cfg, imported=settings.imported)))
    except UserError:
        return False
    except BUGS:
        return True
    return False
