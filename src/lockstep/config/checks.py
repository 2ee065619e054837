"""Checks a config: the rules that need neither torch nor the user's classes, then those that import the user's classes.

All problems that can be detected at the same time are reported together.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from omegaconf import DictConfig

from lockstep.config import rules
from lockstep.config.compose import (
    CONFIG_ERRORS,
    compose_config,
    compose_each,
    key_of,
    warn_of_replaced_choices,
    without_replaced_defaults,
)
from lockstep.config.draft import Draft, values_of
from lockstep.config.formatting import to_text
from lockstep.config.instantiate import (
    GIVEN,
    data_set_problems,
    problems,
    required_arguments,
)
from lockstep.config.run_config import COMPONENTS, Component, RunConfig
from lockstep.config.schema import KEYS, NEEDED, OPTIONAL, RECIPES
from lockstep.config.settings import Settings
from lockstep.config.targets import parameters
from lockstep.errors import UserError, raise_problems

# --- Signatures ---


def components_of(config: RunConfig, group: str) -> Mapping[str, Component]:
    """The components of a group, by config key."""
    value = getattr(config, group)
    return {group: value} if group in COMPONENTS else {f"{group}.{name}": each for name, each in value.items()}


def signature_problems(settings: Settings, *, shipped: bool) -> Iterator[str]:
    """Keys that a class does not accept, or whose values have the wrong type. Excludes `data`."""
    from lockstep.compat import others  # noqa: F401  # must precede the import of Lightning

    metrics = {f"task.metrics.{name}": each for name, each in settings.cfg.task.parts("metrics").items()}
    groups = ("task", "model", "strategy", "optim", "schedule", "callbacks", "logger")
    every = [item for group in groups for item in components_of(settings.cfg, group).items() if item[1]]
    for key, component in [*every, *metrics.items()]:
        if shipped or not component.is_shipped:
            yield from problems(rules.optimizer_node(settings) if key == "optim" else component.node, key)


# --- The classes of data and task ---


def data(settings: Settings) -> Iterator[str]:
    """Keys of `data` that its class does not accept."""
    component = settings.cfg.data
    if settings.own_loaders:
        yield from problems(component.node, "data")
        yield from ignored_keys(settings)
        return
    for key in (key for key in component.kwargs if f"loader.{key}" in KEYS):
        setting = f"{key}={to_text(component.kwargs[key])}"
        yield f"data.{setting} is a key of the loader. Set loader.{setting}, which is also passed to a class with this argument."
        component = component.without(key)
    yield from data_set_problems(component)


def ignored_keys(settings: Settings) -> Iterator[str]:
    """Keys and groups that have no effect with a LightningDataModule."""
    component = settings.cfg.data
    if settings.request and settings.request.part is None:
        yield f"input={settings.request.input}: {component.target} is a LightningDataModule, which reads no files. Set input=test, or add a predict_dataloader and set input=predict."
        return
    defaults = compose_config("train", []).loader
    loader = vars(settings.cfg.loader) if settings.cfg.loader else {}
    for key, value in ((key, value) for key, value in loader.items() if value != defaults[key]):
        argument = f"{'' if key in component else '+'}data.{key}={to_text(value)}"
        yield f"loader.{key}={to_text(value)} has no effect: {component.target} creates its own batches. Remove it; if the class has this argument, pass {argument}."
    if settings.operations:
        yield f"augment.{next(iter(settings.operations))} has no effect: {component.target} creates its own batches. Set augment=none."


def task(settings: Settings) -> Iterator[str]:
    cfg = settings.cfg
    if not cfg.task.is_shipped and cfg.checkpoint.monitor and cfg.checkpoint.mode not in ("max", "min"):
        yield f"checkpoint.mode={cfg.checkpoint.mode} is invalid; expected one of max, min. Set checkpoint.mode=min."
    shipped, title = cfg.task.is_shipped and "replaces" not in cfg.task, cfg.task.title
    required = {*GIVEN} if shipped else required_arguments(cfg.task)
    for argument, group in GIVEN.items():
        # With weights from a checkpoint, groups may be absent: the train.py of that run may have built the objects itself.
        if argument in required and not (settings.weights or getattr(cfg, group)):
            yield f"{group}=none, but {title} requires `{argument}`. Choose one with {group}=<name>."
    replaced = cfg.task.get("replaces", [group for argument, group in GIVEN.items() if argument not in required])
    if groups := [group for group in OPTIONAL if group in replaced and getattr(cfg, group)]:
        options = " ".join(f"{group}=none" for group in groups) if "replaces" in cfg.task else "task=lightning_module"
        yield f"{', '.join(groups)} would have no effect: {cfg.task.target} has its own. Set {options}, or begin its config with defaults: [lightning_module]; or let its constructor take net, optimizer and scheduler, or pass them on: super().__init__(**given)."
    if cfg.task.get("metrics") and not shipped and "metrics" not in (parameters(cfg.task.target) or {}):
        yield f"task.metrics has no effect: the constructor of {title} takes no `metrics`."
    if settings.spec.is_sharded and not cfg.optim:
        reason = f"needs an optimizer from the group optim with strategy={cfg.strategy.name}, but {title} creates its own. Set strategy=ddp"
        yield from settings.conflicts({"exact.logical_ranks": reason})


def unused_overrides(settings: Settings) -> Iterator[str]:
    """Overrides that have no effect because train.py builds the object of that group itself."""
    groups = {"task", "model", "data", "optim", "schedule", "loader", "augment"} - settings.built_groups
    by_hand = [group for group in groups if getattr(settings.cfg, group)]
    for override in settings.overrides or ():
        group, _, name = override.lstrip("+~").partition("=")[0].partition(".")
        if group in by_hand and name not in NEEDED.get(group, ()):  # the engine reads the NEEDED keys anyway
            yield f"{override} has no effect: train.py creates this object itself. Remove it."


# --- Checks that need the prepared data ---


def step_problems(settings: Settings, samples: int, test_batches: int) -> Iterator[str]:
    """Limits that exceed the length of a run with `samples` training samples per epoch, or that leave nothing."""
    trainer = settings.cfg.trainer
    limit = trainer.limit_test_batches  # of the others, Lightning reports it before training
    if isinstance(limit, float) and limit and int(limit * test_batches) == 0:
        yield f"trainer.limit_test_batches={limit} of {test_batches} leaves no batches to test. Set a larger number."
    batches, total = settings.epoch_batches(samples), settings.total_steps(samples)
    least = {
        "min_epochs": (trainer.min_epochs or 0) * (batches // trainer.accumulate_grad_batches),
        "min_steps": trainer.min_steps or 0,
    }
    for key in (key for key, steps in least.items() if steps > total):
        yield f"trainer.{key}={getattr(trainer, key)} is more than the run's {total:g} steps allow. Set a smaller number, or a larger trainer.max_epochs or trainer.max_steps."


# --- All rules ---

Rule = Callable[[Settings], Iterator[str]]

# Each rule, with the groups whose classes it inspects. It runs after any user classes among these are imported.
EVALUATION: dict[Rule, tuple[str, ...]] = {
    rules.devices: (),
    rules.strategy: (),
    data: ("data",),
    rules.loading: ("data", "augment"),
    task: ("task",),
    rules.processes: (),
}
TRAINING: dict[Rule, tuple[str, ...]] = EVALUATION | {
    rules.exact_training: (),
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
        UserError: all problems that can be detected this way: first those of single keys, then those between keys.
    """
    settings = Settings.of(values_of(draft))
    raise_problems(rule_errors(settings, evaluating=evaluating, early=True, left_out=() if with_data else (data,)))
    return settings


def check_classes(settings: Settings, *, evaluating: bool = False, shipped: bool = False) -> list[str]:
    """Problems that `check` cannot detect: runs the rules on the user's classes, and, only on request because their import takes seconds,
    checks the signatures of all classes, the `shipped` ones too."""
    # Skipped for an evaluation: its config has already trained. The job checks the user's, as it imports everything anyway.
    signatures = signature_problems(settings, shipped=True) if shipped and not evaluating else ()
    return [*signatures, *rule_errors(settings, evaluating=evaluating, early=False)]


def rule_errors(settings: Settings, *, evaluating: bool, early: bool, left_out: Collection[Rule] = ()) -> Iterator[str]:
    """The errors of the rules that run before the user's classes are imported (`early`) or afterwards."""
    for rule, groups in (EVALUATION if evaluating else TRAINING).items():
        parts = [part for group in groups for part in components_of(settings.cfg, group).values()]
        if rule in left_out or early != all(part.is_shipped for part in parts if part):
            continue
        try:
            yield from rule(settings)
        except UserError as e:
            yield from e.problems


def composed(
    config_name: str, overrides: Sequence[str], always: Sequence[str] = (), *, with_hydra: bool = False
) -> DictConfig:
    """Like `compose_config`, but raises one UserError with all errors of the command."""
    try:
        return compose_config(config_name, [*always, *overrides], with_hydra=with_hydra)
    except CONFIG_ERRORS as e:
        raise UserError(*explain(e, config_name, overrides, always)) from None


def explain(error: BaseException, config_name: str, overrides: Sequence[str], always: Sequence[str] = ()) -> list[str]:
    """All errors of a command line that Hydra rejected with `error`."""
    problems: list[str] = []
    try:
        problems, valid = compose_each(config_name, overrides, always)
        config = compose_config(config_name, [*always, *valid])
        if config_name == "train":  # a config of eval is merged with the run's config before it is checked
            # imports the class of the data only if the command concerns it
            with_data = any(key_of(o).partition(".")[0] in ("data", *RECIPES) for o in valid)
            check(without_replaced_defaults(Draft(config), valid), with_data=with_data)
    except UserError as e:
        problems += e.problems
    except CONFIG_ERRORS as e:
        error = e
    return problems or [" ".join(f"{' '.join(overrides)}: {error}".split()).removeprefix(": ")]


def resolve(overrides: Sequence[str]) -> RunConfig:
    """The config of `python train.py <overrides>`. Raises UserError with all its errors."""
    warn_of_replaced_choices(overrides)
    return check(without_replaced_defaults(Draft(composed("train", overrides)), overrides)).with_run_identity().cfg
