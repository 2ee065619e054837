"""What a config may name at which key, and the arguments of what it names. Free of torch."""

import contextlib
import importlib
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from lockstep import PACKAGE
from lockstep.config import project, source
from lockstep.config.schema import KEYS
from lockstep.config.source import takes_one as takes_one
from lockstep.config.words import nearest, shown
from lockstep.errors import UserError

# --- What a config may name at which key: a class of the key's kind, or a function that says it returns one. Free of torch ---
#
# A config may come from a stranger: every checkpoint holds one. So no package is admitted as a whole. Classes are known by the names
# of their bases, so a check of the user's own classes imports no more than they do.

# Packages whose modules a config may import, besides those of the project (config/project.py).
TRUSTED = (
    "lockstep.",
    "torch.nn.",
    "torch.optim.",
    "torchvision.",
    "torchmetrics.",
    "timm.",
    "lightning.pytorch.",
    "optuna.pruners.",
)
SHIPPED = ("lockstep.", "torch.optim.", "lightning.pytorch.callbacks.", "lightning.pytorch.loggers.")
LOADERS = "lightning.pytorch.core.datamodule.LightningDataModule"
MODULE = "lightning.pytorch.core.module.LightningModule"
# Each base, and the libraries' modules that may define its subclasses. Those of Lockstep and of the project always may.
BASES: dict[str, tuple[str, ...]] = {
    "lockstep.tasks.task.Task": (),
    "lockstep.data.dataset.DataSet": (),
    "lockstep.data.dataset.Arrays": (),
    "lockstep.augment.operation.Operation": (),
    MODULE: (),
    LOADERS: (),
    "lightning.pytorch.callbacks.callback.Callback": ("lightning.pytorch.callbacks.",),
    "lightning.pytorch.loggers.logger.Logger": ("lightning.pytorch.loggers.",),
    "lightning.pytorch.strategies.strategy.Strategy": ("lightning.pytorch.strategies.",),
    "torch.nn.modules.module.Module": (
        "torch.nn.", "torchvision.models.", "torchvision.ops.", "timm.models.", "timm.layers.", "timm.loss.",
    ),
    "torch.optim.optimizer.Optimizer": ("torch.optim.", "timm.optim."),
    "torch.optim.lr_scheduler.LRScheduler": ("torch.optim.",),
    "torchmetrics.metric.Metric": ("torchmetrics.",),
    "torch.utils.data.dataset.Dataset": ("torchvision.datasets.",),
    "optuna.pruners._base.BasePruner": ("optuna.pruners.",),
    "builtins.object": ("torchvision.transforms.",),  # its classes have no base in common; each only changes samples
}  # fmt: skip
UNPICKLING = ("torchvision.datasets.lsun.",)  # reads a pickle beside the data, which may run code
# The kinds of a key, by the last parts of their bases. A node within another node may be of any kind, or anything of the project's.
KINDS = {
    "task": ("Task", "LightningModule"),
    "model": ("Module",),
    "data": ("DataSet", "LightningDataModule"),
    "strategy": ("Strategy",),
    "optim": ("Optimizer",),
    "schedule": ("LRScheduler",),
    "task.metrics.*": ("Metric",),
    "augment.*": ("Operation",),
    "callbacks.*": ("Callback",),
    "logger.*": ("Logger",),
}


def trusted() -> tuple[str, ...]:
    """The beginnings of names that may be looked up."""
    project.make_importable()
    return (*TRUSTED, *(pattern.removesuffix("*") for pattern in project.trusted()))


def own() -> tuple[str, ...]:
    """The packages of the project, without those of Lockstep, which a checkout has among them."""
    return tuple(f"{name}." for name in project.current().packages if name not in (PACKAGE.name, "hydra_plugins"))


def wanted(key: str) -> tuple[str, ...] | None:
    """The kinds of a key; None for a node within another one."""
    return KINDS.get(key) or KINDS.get(f"{key.rpartition('.')[0]}.*")


def home(target: Any) -> str:
    """Where a class or function is defined, whatever name it was found by."""
    return f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def admits(key: str, where: str, kinds: Iterable[str] | None) -> bool:
    """Whether `key` takes what is defined at `where`: a class with these bases, or a function that returns such a class (None: it does
    not say)."""
    names, own_packages = wanted(key), own()
    if where.startswith(UNPICKLING):
        return False
    if where.startswith(own_packages) and (names is None or kinds is None):
        return True
    here = (f"{PACKAGE.name}.", *own_packages)
    return kinds is not None and any(
        base in kinds and where.startswith(modules if base == "builtins.object" else (*modules, *here))
        for base, modules in BASES.items()
        if names is None or base.rpartition(".")[2] in names
    )


def refusal(path: str, key: str) -> str:
    bases = [base.split(".") for base in BASES if base.rpartition(".")[2] in (wanted(key) or ())]
    kinds = (
        " or ".join(f"{library}'s {name}" for library, *_, name in bases)
        or "Module, Optimizer, Dataset, Metric or the like"
    )
    return (
        f"{key}._target_={path} may not be named here: {key} takes a subclass of {kinds}, or a function annotated to return one, "
        "of your own packages or of the library that it belongs to."
    )


def named(path: str, key: str) -> None:
    """Raises UserError if `key` may not name this path, as far as its source says: before anything is imported."""
    if not path.startswith(trusted()):
        allowed = ", ".join(prefix.removesuffix(".") for prefix in trusted())
        raise UserError(
            f"{key}._target_={path} may not be named by a config; packages that may: {allowed}. "
            "They include the packages in src/ of your project. To allow another one, add it to [tool.lockstep] packages in its pyproject.toml."
        )
    try:
        found = source.find(path)
    except LookupError as e:
        raise UserError(f"{key}._target_={path} does not exist: {e}.") from None
    if found is None or (described := source.kinds(*found)) is None:
        return
    where, kinds, whole = described
    if whole and not admits(key, where, kinds):
        raise UserError(refusal(path, key))


def target_of(path: str, key: str) -> Callable[..., Any]:
    """The object that a `_target_` names. Raises UserError if it may not be named or does not exist.

    Calls nothing, and imports only what a config may name, as importing a module runs it.
    """
    named(path, key)
    try:
        target: Any = locate(path)
    except LookupError as e:
        raise UserError(f"{key}._target_={path} does not exist: {e}.") from None
    function = target
    while isinstance(function, partial):
        function = function.func
    made = function if isinstance(function, type) else returned(function)
    kinds = [home(base) for base in made.__mro__] if isinstance(made, type) and made is not Any else None
    if not callable(function) or not admits(key, home(function), kinds):
        raise UserError(refusal(path, key))
    return target


def returned(function: Any) -> Any:
    """The annotation of what a function returns; None without one, or if only a type checker understands it."""
    function = getattr(function, "__func__", function)
    try:
        return typing.get_type_hints(function).get("return")
    except Exception:  # another annotation of it, such as one under TYPE_CHECKING
        return None


def nodes(value: Any, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A node with a `_target_` and those within it, which Hydra makes too, with their keys."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield key, value
        value = {} if value.get("_recursive_") is False else value
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    for name, item in value.items() if isinstance(value, Mapping) else ():
        yield from nodes(item, f"{key}.{name}")


def is_shipped(node: Mapping[Any, Any]) -> bool:
    """Whether a node names a class that comes with Lockstep. Its keys are known without importing it."""
    return str(node.get("_target_")).startswith(SHIPPED)


def is_a(path: str, base: str) -> bool:
    """Whether a path names a subclass of `base`: by its source, or, where that does not tell, imported."""
    if not path.startswith(trusted()):
        return False
    with contextlib.suppress(LookupError):
        described = (found := source.find(path)) and source.kinds(*found)
        if described and (described[2] or base in (described[1] or ())):
            return base in (described[1] or ())
        return base in map(home, getattr(locate(path), "__mro__", ()))
    return False


# --- The arguments and their types of a class or function named by a config, including those of base classes ---


def locate(path: str) -> Any:
    """The object of a dotted path. Raises LookupError if there is none; lets errors of the modules themselves through.

    Imports only what a config may name, as importing a module runs it.
    As in Hydra, a package's attribute comes before its module of the same name: `lockstep.strategies.base` is a function.
    """
    if not path.startswith(trusted()):
        raise LookupError(f"a config may not name {path}")
    found, parts = None, path.split(".")
    for place, part in enumerate(parts):
        if found is not None and hasattr(found, part):
            found = getattr(found, part)
            continue
        here, module = ".".join(parts[:place]), ".".join(parts[: place + 1])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as e:
            if e.name is None or not f"{module}.".startswith(f"{e.name}."):
                raise  # raised by an import inside that module
            if not here:
                raise LookupError(f"there is no package {part}") from None
            raise LookupError(f"{here} has no {part}{nearest(part, dir(found))}") from None
    return found


def parameters(path: str, *, imported: bool = True) -> dict[str, inspect.Parameter] | None:
    """The arguments of a target by name; None if they are not known. An annotation that is not known is empty."""
    with contextlib.suppress(LookupError, TypeError, ValueError):
        if (found := source.find(path)) and (arguments := source.arguments(*found)) is not None:
            return arguments
        return dict(inspect.signature(locate(path)).parameters) if imported else None
    return None


def accepted(path: str, offered: Mapping[str, Any]) -> dict[str, Any]:
    """The `offered` arguments that the signature of a target names."""
    names = parameters(path) or {}
    return {name: value for name, value in offered.items() if name in names}


def type_problem(target: str, parameter: inspect.Parameter, key: str, value: Any) -> Iterator[str]:
    """Whether the annotation of an argument accepts a value; an argument without annotation accepts any."""
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty or has_target(value):
        return
    if key in KEYS and is_shipped({"_target_": target}):
        return  # config/schema.py describes it better
    from pydantic import TypeAdapter, ValidationError  # 0.1 s, which --help need not wait for

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation, config={"arbitrary_types_allowed": True})
    except Exception:  # annotations that only a type checker understands
        return
    try:
        found = adapter.validate_python(value)
        wrong = isinstance(value, str | bool) and isinstance(found, int | float) and type(found) is not type(value)
    except ValidationError:
        wrong = True
    except Exception:
        return
    if wrong:
        name = getattr(annotation, "__name__", None) if isinstance(annotation, type) else None
        yield f"{key}={shown(value)} is not possible; it takes {name or str(annotation).replace('typing.', '')}."


def has_target(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(map(has_target, value.values()))
    return isinstance(value, list) and any(map(has_target, value))
