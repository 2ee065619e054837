"""Every check of a config without torch, whose problems are reported together, and those that need the classes of the user."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

from lockstep.config import rules
from lockstep.config.draft import Draft, values_of
from lockstep.config.instantiate import (
    ENGINE,
    SPECIAL,
    data_set_problems,
    not_its_own,
    not_taken,
    problems,
)
from lockstep.config.renames import LOADER_KEYS, RENAMES
from lockstep.config.run_config import COMPONENTS, Component, Invalid, Refused, RunConfig
from lockstep.config.schema import KEYS, NEEDED, OPTIONAL
from lockstep.config.settings import Settings
from lockstep.config.targets import foreign_names, imports_no_torch, written_arguments, written_value
from lockstep.config.words import shown
from lockstep.errors import UserError, did_you_mean, raise_problems

TRAINED = ("train/loss", "train/lr")  # what the training of every task logs
MEASURED = ("_per_s", "_memory_gib")  # endings of metrics that depend on the data's unit or on the device

# --- Signatures ---


def components(cfg: RunConfig) -> dict[str, Component]:
    """All components by their keys. Without `data`."""
    found = {key: getattr(cfg, key) for key in COMPONENTS if key != "data" and getattr(cfg, key)}
    groups = {"task.metrics": cfg.task.parts("metrics"), "callbacks": cfg.callbacks, "logger": cfg.logger}
    return found | {f"{key}.{name}": each for key, group in groups.items() for name, each in group.items()}


def unread_arguments(settings: Settings) -> Iterator[str]:
    """Keys without a Kind that a class does not take. Its source is read, because it takes seconds to import. If that of one class does
    not say what it takes, `check_classes` reports all."""
    for key, component in components(settings.cfg).items() if are_readable(settings) else ():
        left_out = (*SPECIAL, *ENGINE.get(key, ()))
        asked = [name for name in component.kwargs if name not in left_out and f"{key}.{name}" not in KEYS]
        known = written_arguments(component.target) if asked else None
        yield from not_taken(component.target, key, asked, known) if known is not None else ()


def are_readable(settings: Settings) -> bool:
    """Whether the sources of all classes of the user's say what they take, so none is imported to be checked."""
    cfg = settings.cfg
    own = [each for each in components(cfg).values() if not each.is_shipped]
    is_read = all(written_arguments(each.target) is not None for each in own)
    return is_read and (cfg.data.is_shipped or imports_no_torch(cfg.data.target))


def signature_problems(settings: Settings, *, shipped: bool) -> Iterator[str]:
    """Keys that a class of the user's does not take or that have another type, and of the `shipped` ones too, which take seconds to
    import. Without `data`."""
    for key, component in components(settings.cfg).items():
        if shipped or not component.is_shipped:
            from lockstep.compat import others  # noqa: F401  # before Lightning

            yield from problems(settings.optimizer_node if key == "optim" else component.node, key)


# --- The classes of data and task ---


def data(settings: Settings) -> Iterator[str]:
    """The keys of `data`, by its class."""
    component, own = settings.cfg.data, settings.own_loaders
    if not own:
        for key, value in component.kwargs.items():
            if now := RENAMES.get(f"data.{key}"):
                yield f"data.{key}={shown(value)} is {now} now. Set {now}={shown(value)}; a class that has this argument gets it from there."
        component = component.without(*LOADER_KEYS)
    left = not_its_own(component)
    if len(left) > 2:  # of the data that was chosen before; one sentence instead of one for each
        yield f"data._target_={component.target} takes no {', '.join(left)}. Pass data=own data._target_={component.target}, and its own arguments as +data.<name>=<value>."
    else:
        yield from problems(component.node, "data") if own else data_set_problems(component)


def own_loaders(settings: Settings) -> Iterator[str]:
    """What a LightningDataModule leaves without effect."""
    component = settings.cfg.data
    if not settings.own_loaders:
        return
    for key, value in changed_loader_keys(settings.cfg).items():
        yield f"loader.{key}={shown(value)} has no effect: {component.target} makes its own batches. Remove it; a class that has this argument gets it with {'' if key in component else '+'}data.{key}={shown(value)}."
    if settings.operations:
        yield f"augment.{next(iter(settings.operations))} has no effect: {component.target} makes its own batches. Set augment=none."
    if not settings.custom_module:
        yield (
            f"task={settings.cfg.task.title} needs a data set that describes itself; data={settings.cfg.data.title} is a LightningDataModule with its own dataloaders. "
            "Write a lockstep.data.DataSet, or use a LightningModule as the task."
        )
    if settings.cfg.trainer.accumulate_grad_batches == "auto":
        yield f"trainer.accumulate_grad_batches=auto divides Lockstep's batches, but data={settings.cfg.data.title} makes its own. Set a number."


def changed_loader_keys(cfg: RunConfig) -> dict[str, Any]:
    """What a command or a recipe has set of the loader."""
    from lockstep.config.compose import compose_config  # which checks what it composes

    usual = compose_config("train", []).loader
    return {key: value for key, value in vars(cfg.loader).items() if value != usual[key]} if cfg.loader else {}


def task(settings: Settings) -> Iterator[str]:
    cfg = settings.cfg
    if not cfg.task.is_shipped and cfg.checkpoint.monitor and cfg.checkpoint.mode not in ("max", "min"):
        yield f"checkpoint.mode={cfg.checkpoint.mode} is invalid; expected one of max, min. Set checkpoint.mode=min."
    yield from (own_module if settings.custom_module else own_task)(settings)


def own_task(settings: Settings) -> Iterator[str]:
    """Of a Task."""
    cfg = settings.cfg
    for name in sorted({"loss", "count"} & cfg.task.parts("metrics").keys()):
        yield f"task.metrics.{name}: every task already logs {name}. Use another name."
    # a run whose train.py made one has none of these in its config
    for group in [group for group in OPTIONAL if not (settings.weights or getattr(cfg, group))]:
        yield (
            f"{group}=none is for a LightningModule with its own {group}; task={settings.cfg.task.title} is a Task, which needs one. Choose it with "
            f"{group}=<name>{', or set task=own instead of task=lightning_module' if 'replaces' in cfg.task else ''}."
        )
    if written_value(cfg.task.target, "between_samples"):
        yield from whole_batch_problems(settings)


def replacing(settings: Settings) -> Iterator[str]:
    """Groups without effect on task=lightning_module, which says so before its class is known."""
    if "replaces" in settings.cfg.task:
        yield from replaced(settings)


def replaced(settings: Settings, advice: str = "") -> Iterator[str]:
    cfg = settings.cfg
    if groups := [group for group in ("model", "optim", "schedule") if getattr(cfg, group)]:
        options = advice or " ".join(f"{group}=none" for group in groups)
        yield f"{', '.join(groups)} would have no effect: {cfg.task.target} has its own. Set {options}, or begin its config with defaults: [lightning_module]."


def own_module(settings: Settings) -> Iterator[str]:
    """Groups and keys that a LightningModule as the task does not use."""
    cfg, name = settings.cfg, settings.cfg.task.title
    if "replaces" not in cfg.task:
        yield from replaced(settings, "task=lightning_module")
    if cfg.task.get("metrics"):
        yield f"task.metrics has no effect: {name} logs its own metrics. Remove it."
    if settings.spec.is_sharded:
        own = f"needs an optimizer of the group optim with strategy={cfg.strategy.name}, and {name} makes its own. Set strategy=ddp"
        yield from settings.excluded({"exact.logical_ranks": (None, own)})
    if settings.spec.splits_batches:
        yield f"strategy={cfg.strategy.name} changes how a task's network is called; {name} calls its own. Set strategy=ddp."


def mixing(settings: Settings) -> Iterator[str]:
    """Operations that a LightningModule as the task does not know."""
    mixing = [key for key, each in settings.operations.items() if getattr(each, "mixes", False)]
    for operation in mixing if settings.custom_module else ():
        yield f"augment.{operation} mixes the losses of two targets, which a task computes and {settings.cfg.task.title} does not. Remove it: ~augment.{operation}."


def whole_batch_problems(settings: Settings) -> Iterator[str]:
    """What divides the global batch of a task that compares its samples (`Task.between_samples`)."""
    why = f"task={settings.cfg.task.title} compares the samples of a batch (between_samples)"
    cfg, given = settings.cfg, settings.cfg.trainer.accumulate_grad_batches
    if cfg.exact.logical_ranks:
        yield f"exact.logical_ranks={cfg.exact.logical_ranks} divides the global batch into logical ranks, but {why}. Remove it."
    elif given != 1:
        yield (
            f"trainer.accumulate_grad_batches={given} divides the global batch into micro-batches, but {why}. "
            "Set trainer.accumulate_grad_batches=1; if memory runs out, use more processes or a smaller loader.batch_size."
        )


def monitor_problems(settings: Settings, metrics: list[str]) -> Iterator[str]:
    """Monitored metrics that nothing logs. The metrics of callbacks that are not Lockstep's are known only when the run logs them."""
    cfg = settings.cfg
    first = "task.monitor" if cfg.task.get("monitor") == cfg.checkpoint.monitor else "checkpoint.monitor"
    monitors = {first: cfg.checkpoint.monitor}
    monitors |= {f"callbacks.{name}.monitor": each.get("monitor") for name, each in cfg.callbacks.items()}
    own = all(each.target.startswith("lockstep.") for each in cfg.callbacks.values())
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


def unused(settings: Settings) -> Iterator[str]:
    """Keys of the command without effect, because train.py makes an object of its own in place of that of their group."""
    by_hand = {"task", "model", "data", "optim", "schedule", "loader", "augment"} - settings.asked
    for override in settings.overrides or ():
        group, _, name = override.lstrip("+~").partition("=")[0].partition(".")
        if group in by_hand and name not in NEEDED.get(group, ()):  # which the engine reads
            yield f"{override} has no effect: train.py makes this object itself. Remove it."


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

Rule = Callable[[Settings], Iterator[str]]

# Each rule, and the groups whose classes it asks: it waits until those of the user's are imported.
EVALUATION: dict[Rule, tuple[str, ...]] = {
    rules.devices: (),
    rules.strategy: (),
    data: ("data",),
    own_loaders: ("data", "task", "augment"),
    rules.loading: ("data", "augment"),
    replacing: (),
    task: ("task",),
    mixing: ("task", "augment"),
    rules.processes: (),
}
TRAINING: dict[Rule, tuple[str, ...]] = EVALUATION | {
    rules.exact_training: (),
    rules.images: ("augment",),
    rules.division: ("data", "augment"),
    rules.accumulation: (),
    rules.optimizer: ("optim",),
    rules.monitored: (),
    rules.checkpoints: (),
    rules.length: (),
}


def check(draft: Draft, *, evaluating: bool = False, with_data: bool = True) -> Settings:
    """The settings of a draft. Imports neither torch nor the user's classes, and reads no data.

    Raises:
        UserError: all problems that need neither.
    """
    cfg, found = values_of(draft)
    augment = {f"augment.{name}": each for name, each in cfg.augment.items()}
    for key, component in (components(cfg) | augment | {"data": cfg.data}).items():
        found += foreign_names(component.node, key)
    try:
        world: Any = Settings.of(cfg).world
    except Refused:  # nobody knows the processes
        world = Invalid()
    settings = Settings(cfg, world, drawn=draft.drawn)
    found += unread_arguments(settings)
    left_out = () if with_data else (data,)
    raise_problems(broken_rules(settings, found, evaluating=evaluating, early=True, left_out=left_out))
    return settings


def check_classes(settings: Settings, *, evaluating: bool = False, shipped: bool = False) -> list[str]:
    """The problems that `check` cannot see: imports the user's classes, checks their signatures, and applies the rules that ask them.

    The signatures of the `shipped` classes, which take seconds to import, are looked at only on demand.
    """
    # Skipped for an evaluation: its config has already trained. The job checks types, once all is imported anyway.
    unknown = shipped or not are_readable(settings)
    found = list(signature_problems(settings, shipped=shipped)) if unknown and not evaluating else []
    return broken_rules(settings, found, evaluating=evaluating, early=False)


def broken_rules(
    settings: Settings, found: list[str], *, evaluating: bool, early: bool, left_out: Collection[Rule] = ()
) -> list[str]:
    """`found` and the problems of the rules that run `early`, before the user's classes are imported, or of the others. A rule ends where it
    reads a value that is refused already."""
    readable = are_readable(settings)
    for rule, groups in (EVALUATION if evaluating else TRAINING).items():
        known = (settings.is_known(group, readable=readable, reads=rule is data) for group in groups)
        if rule in left_out or early != all(known):
            continue
        try:
            found += rule(settings)
        except UserError as e:
            found += e.problems
        except Refused:
            pass
    return list(dict.fromkeys(found))
