"""The classes and functions that a config may name at each key, and their parameters. Free of torch."""

import importlib
import inspect
import os
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from lockstep import PACKAGE
from lockstep.config import project
from lockstep.config.formatting import to_text
from lockstep.errors import UserError, did_you_mean, raise_problems

# --- What each key accepts: a class of the key's kind, or a function whose annotation says that it returns one ---
# A config may be untrusted, because every checkpoint contains one. So no package is allowed as a whole. Bases are given
# by name, so checking a user class imports only what the class itself imports.

# Packages whose modules a config may import, in addition to those of the project (config/project.py).
TRUSTED = (
    "lockstep.",
    "torch.nn.",
    "torch.optim.",
    "torchvision.",
    "torchmetrics.",
    "timm.",
    "albumentations.",
    "lightning.pytorch.",
    "optuna.pruners.",
)
# Each base class: the key that accepts its subclasses ("" for nested nodes only, which may be of any kind), and the library modules that
# may define them. Lockstep and the project always may.
BASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "lockstep.data.dataset.DataSet": ("data", ()),
    "lockstep.data.dataset.Arrays": ("", ()),
    "lockstep.kit.augment.operation.Operation": ("augment.*", ()),
    "lightning.pytorch.core.module.LightningModule": ("task", ()),
    "lightning.pytorch.core.datamodule.LightningDataModule": ("data", ("lightning.pytorch.core.datamodule.",)),
    "lightning.pytorch.callbacks.callback.Callback": ("callbacks.*", ("lightning.pytorch.callbacks.",)),
    "lightning.pytorch.loggers.logger.Logger": ("logger.*", ("lightning.pytorch.loggers.",)),
    "lightning.pytorch.strategies.strategy.Strategy": ("strategy", ("lightning.pytorch.strategies.",)),
    "torch.nn.modules.module.Module": ("model", (
        "torch.nn.", "torchvision.models.", "torchvision.ops.", "timm.models.", "timm.layers.", "timm.loss.",
    )),
    "torch.optim.optimizer.Optimizer": ("optim", ("torch.optim.", "timm.optim.")),
    "torch.optim.lr_scheduler.LRScheduler": ("schedule", ("torch.optim.",)),
    "torchmetrics.metric.Metric": ("task.metrics.*", ("torchmetrics.",)),
    "torch.utils.data.dataset.Dataset": ("", ("torchvision.datasets.",)),
    "optuna.pruners._base.BasePruner": ("", ("optuna.pruners.",)),
    "builtins.object": ("augment.*", (  # transforms have no common base
        "lockstep.kit.augment.", "torchvision.transforms.", "timm.data.auto_augment.", "timm.data.random_erasing.", "timm.data.transforms.",
        "albumentations.augmentations.", "albumentations.core.composition.",
    )),
}  # fmt: skip
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # else its import checks for a newer version online
CLASS = "my_package.my_module.MyClass"  # in messages
FUNCTIONS = ("timm.data.auto_augment.",)  # functions that create transforms, without a return annotation
UNPICKLING = ("torchvision.datasets.lsun.",)  # reads a pickle file next to the data, which may run code


def trusted() -> tuple[str, ...]:
    """The prefixes of names that may be imported."""
    project.make_importable()
    return tuple(dict.fromkeys([*TRUSTED, *(f"{package}." for package in project.current().packages)]))


def bases_of(key: str) -> dict[str, tuple[str, ...]]:
    """The bases that a key accepts, each with the library modules that may define subclasses; of a nested node, all."""
    pattern = f"{key.rpartition('.')[0]}.*" if "." in key else key
    accepted = {base: modules for base, (accepting, modules) in BASES.items() if accepting == pattern}
    return accepted or {base: modules for base, (_, modules) in BASES.items()}


def qualified_name(target: Any) -> str:
    """The dotted path where a class or function is defined, regardless of the path that it was imported from."""
    return f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def is_allowed(target: Any, key: str) -> bool:
    """Whether a config may name `target` at `key`. Does not call `target`."""
    while isinstance(target, partial):
        target = target.func
    path, accepted = qualified_name(target), bases_of(key)
    # In a checkout, the project's packages include those of Lockstep.
    packages = tuple(f"{name}." for name in project.current().packages if name not in (PACKAGE.name, "hydra_plugins"))
    if path.startswith(UNPICKLING) or not callable(target):
        return False
    if path.startswith((*packages, *FUNCTIONS)) and "builtins.object" in accepted:
        return True
    cls = target
    if not isinstance(target, type):
        cls = None
        with suppress(Exception):  # an unrelated annotation cannot be resolved, e.g. one under TYPE_CHECKING
            cls = typing.get_type_hints(getattr(target, "__func__", target)).get("return")
        if not isinstance(cls, type) or cls is Any:
            return path.startswith(packages)
    own = (f"{PACKAGE.name}.", *packages)
    bases = accepted.keys() & {qualified_name(base) for base in cls.__mro__}
    return any(path.startswith(accepted[base] + (() if base == "builtins.object" else own)) for base in bases)


def nodes(value: Any, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A node with a `_target_`, and the nested nodes that Hydra would instantiate too, each with its key."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield key, value
        value = {} if value.get("_recursive_") is False else value
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    for name, item in value.items() if isinstance(value, Mapping) else ():
        yield from nodes(item, f"{key}.{name}")


def target_error(node: Any, key: str) -> Iterator[str]:
    """The error if a node has no class: it is not a node, or its `_target_` is missing or not a dotted name."""
    target = node.get("_target_") if isinstance(node, Mapping) else None
    if not isinstance(node, Mapping):
        yield f"{key}={to_text(node)} is invalid; expected a class and its arguments, for example {key}={{_target_: {CLASS}}}."
    elif target in (None, "???"):
        yield f"{key}._target_ is missing. Set it to a class, for example {key}._target_={CLASS}."
    elif not isinstance(target, str) or "." not in target.strip("."):
        yield f"{key}._target_={to_text(target)} is invalid; expected a class, for example {key}._target_={CLASS}."


def disallowed_targets(value: Any, key: str) -> Iterator[str]:
    """An error for each target in a node and its nested nodes that no config may name. Imports nothing."""
    allowed = trusted()
    for node_key, node in nodes(value, key):
        path = node["_target_"]
        if isinstance(path, str) and "." in path and not path.startswith(allowed):
            packages = ", ".join(prefix.removesuffix(".") for prefix in allowed)
            yield f"{node_key}._target_={path} is not allowed in a config; allowed packages: {packages}. Add yours to [tool.lockstep] packages in pyproject.toml."


# --- Parameters of a class or function named by a config, with types, including those of base classes ---


def locate(path: str) -> Any:
    """The object at a dotted path. Raises LookupError if there is none, and any error that a module raises on import.

    Imports only what a config may name, because importing a module runs its code.
    As in Hydra, a package's attribute precedes its module of the same name: `lockstep.strategies.base` is a function.
    """
    if not path.startswith(trusted()):
        raise LookupError(f"{path} is not allowed in a config")
    target, parts = None, path.split(".")
    for index, part in enumerate(parts):
        if target is not None and hasattr(target, part):
            target = getattr(target, part)
            continue
        module = ".".join(parts[: index + 1])
        try:
            target = importlib.import_module(module)
        except ModuleNotFoundError as e:
            if e.name is None or not f"{module}.".startswith(f"{e.name}."):
                raise  # raised by an import inside that module
            raise LookupError(f"{e}{did_you_mean(part, dir(target))}") from None
    return target


def target_of(path: Any, key: str) -> Callable[..., Any]:
    """The object that a `_target_` names. Raises UserError if a config may not name it or it does not exist."""
    node = {"_target_": path}
    raise_problems([*target_error(node, key), *disallowed_targets(node, key)])
    try:
        target: Callable[..., Any] = locate(path)
    except LookupError as e:
        raise UserError(f"{key}._target_={path} does not exist: {e}.") from None
    if not is_allowed(target, key):
        accepted = " or ".join(bases_of(key))
        raise UserError(
            f"{key}._target_={path} is not allowed here: {key} accepts a subclass of {accepted}, or a function annotated to return one."
        )
    return target


INHERITED = object()  # the default of a parameter that a base class requires
PASSING_ON = ("lockstep.", "project.")  # their classes pass all of `**kwargs` on to base classes


def parameters(path: str) -> dict[str, inspect.Parameter] | None:
    """The parameters of a target by name, with those that `**kwargs` may pass on to base classes; None if unknown.

    Inherited parameters have a default: the class may set them itself.
    """
    try:
        target = locate(path)
        result = signature(target)
        for base in constructors(target)[1:]:
            rest = [name for name, p in result.items() if p.kind is p.VAR_KEYWORD]
            inherited = [p for p in list(signature(base).values())[1:] if p.kind is not p.VAR_POSITIONAL]  # no `self`
            if not rest or not inherited:
                break
            if path.startswith(PASSING_ON):  # any other class may keep what is in `**kwargs` itself
                del result[rest[0]]
            for p in inherited:
                is_required = p.default is p.empty and accepts_keyword(p)
                result.setdefault(p.name, p.replace(default=INHERITED) if is_required else p)
    except (LookupError, TypeError, ValueError):
        return None
    return result


def signature(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function. Annotations become types, unless one of them exists only for type checkers."""
    constructor: Any = function
    types: dict[str, Any] = {}
    with suppress(Exception):
        types = typing.get_type_hints(constructor.__init__ if isinstance(function, type) else function)
    named = inspect.signature(function).parameters
    return {name: p.replace(annotation=types.get(name, p.annotation)) for name, p in named.items()}


def accepts_keyword(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def constructors(target: Any) -> list[Callable[..., Any]]:
    """The `__init__` of a class and of its base classes, in the order of `super()` calls."""
    classes = getattr(target, "__mro__", (object,))[:-1]
    return [vars(cls)["__init__"] for cls in classes if "__init__" in vars(cls)]


def matching_kwargs(path: str, context: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `context` that a target has parameters for."""
    named = parameters(path)
    return {name: value for name, value in context.items() if named is not None and name in named}


def type_problem(parameter: inspect.Parameter, key: str, value: Any) -> Iterator[str]:
    """The error if the annotation of a parameter does not accept a value. No annotation accepts every value."""
    annotation = parameter.annotation
    if annotation is parameter.empty or isinstance(annotation, str) or any(nodes(value, key)):
        return
    from pydantic import TypeAdapter, ValidationError  # takes 0.1 s, which would delay --help

    name = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
    error = f"{key}={to_text(value)} is invalid; expected {name}."
    try:
        parsed = TypeAdapter(annotation, config={"arbitrary_types_allowed": True}).validate_python(value)
        if isinstance(value, str | bool) and isinstance(parsed, int | float) and type(parsed) is not type(value):
            yield error
    except ValidationError:
        yield error
    except Exception:  # pydantic does not support the annotation, or the annotated type has its own pydantic config
        return
