"""The classes and functions that a config may name at each key, and their parameters. Free of torch."""

import ast
import importlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec, resolve_name
from itertools import pairwise
from pathlib import Path
from typing import Any

from lockstep import LATER, PACKAGE
from lockstep.config import project
from lockstep.config.formatting import to_text
from lockstep.config.renames import moved
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
# Each base class, and the library modules that may define its subclasses. Lockstep and the project always may.
BASES: dict[str, tuple[str, ...]] = {
    "lockstep.data.dataset.DataSet": (),
    "lockstep.data.dataset.Arrays": (),
    "lockstep.kit.augment.operation.Operation": (),
    "lightning.pytorch.core.module.LightningModule": (),
    "lightning.pytorch.core.datamodule.LightningDataModule": ("lightning.pytorch.core.datamodule.",),
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
    "builtins.object": (  # transforms without a common base
        "lockstep.kit.augment.", "torchvision.transforms.", "timm.data.auto_augment.", "timm.data.random_erasing.", "timm.data.transforms.",
        "albumentations.augmentations.", "albumentations.core.composition.",
    ),
}  # fmt: skip
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # else its import checks for a newer version online
CLASS = "my_package.my_module.MyClass"  # in messages
# Modules that import no torch, and those below them that do.
LIGHT = ("numpy.", "PIL.", "lockstep.config.", "lockstep.data.", "lockstep.errors.", "lockstep.kit.", "lockstep.machine.")  # fmt: skip
HEAVY = ("lockstep.data.keyed.", "lockstep.data.loaders.", "lockstep.data.parts.", "lockstep.data.streams.", "lockstep.kit.datamodule.", "lockstep.kit.augment.", "lockstep.kit.panels.", "lockstep.kit.schedules.", "lockstep.kit.task.", "lockstep.kit.tasks.", "lockstep.kit.timm.")  # fmt: skip
PUBLIC = {f"lockstep.{name}": home for name, home in LATER.items()}
FUNCTIONS = ("timm.data.auto_augment.",)  # functions that create transforms, without a return annotation
UNPICKLING = ("torchvision.datasets.lsun.",)  # reads a pickle file next to the data, which may run code
# The kinds of a key, by the class names of their bases. A nested node may be of any kind, or anything of the project.
COMPONENT_TYPES = {
    "task": ("LightningModule",),
    "model": ("Module",),
    "data": ("DataSet", "LightningDataModule"),
    "strategy": ("Strategy",),
    "optim": ("Optimizer",),
    "schedule": ("LRScheduler",),
    "task.metrics.*": ("Metric",),
    "augment.*": ("Operation", "object"),
    "callbacks.*": ("Callback",),
    "logger.*": ("Logger",),
}


def trusted() -> tuple[str, ...]:
    """The prefixes of names that may be imported."""
    project.make_importable()
    return tuple(dict.fromkeys([*TRUSTED, *(f"{package}." for package in project.current().packages)]))


def component_types(key: str) -> tuple[str, ...] | None:
    """The kinds of a key; None for a nested node."""
    return COMPONENT_TYPES.get(key) or COMPONENT_TYPES.get(f"{key.rpartition('.')[0]}.*")


def qualified_name(target: Any) -> str:
    """The dotted path where a class or function is defined, regardless of the path that it was imported from."""
    return f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def is_allowed(target: Any, key: str) -> bool:
    """Whether a config may name `target` at `key`. Does not call `target`."""
    while isinstance(target, partial):
        target = target.func
    path, kinds = qualified_name(target), component_types(key)
    # In a checkout, the project's packages include those of Lockstep.
    packages = tuple(f"{name}." for name in project.current().packages if name not in (PACKAGE.name, "hydra_plugins"))
    if path.startswith(UNPICKLING) or not callable(target):
        return False
    if path.startswith((*packages, *FUNCTIONS)) and (kinds is None or "object" in kinds):
        return True
    cls = target
    if not isinstance(target, type):
        try:
            cls = typing.get_type_hints(getattr(target, "__func__", target)).get("return")
        except Exception:  # an unrelated annotation cannot be resolved, e.g. one under TYPE_CHECKING
            cls = None
        if not isinstance(cls, type) or cls is Any:
            return path.startswith(packages)
    bases = {qualified_name(base) for base in cls.__mro__}
    return any(
        base in bases
        and path.startswith(modules if base == "builtins.object" else (*modules, f"{PACKAGE.name}.", *packages))
        for base, modules in BASES.items()
        if kinds is None or base.rpartition(".")[2] in kinds
    )


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
        if str(path).startswith("pytorch_lightning."):
            yield f"{node_key}._target_={path} is from the package pytorch_lightning. Set lightning.pytorch{path.removeprefix('pytorch_lightning')} instead."
        elif isinstance(path, str) and "." in path and not path.startswith(allowed):
            yield (
                f"{node_key}._target_={path} is not allowed in a config; allowed packages: {', '.join(allowed).replace('.,', ',').removesuffix('.')}. "
                "They include all packages and modules in src/. To allow another package, add it to [tool.lockstep] packages in your pyproject.toml."
            )


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
        parent, module = ".".join(parts[:index]), ".".join(parts[: index + 1])
        try:
            target = importlib.import_module(module)
        except ModuleNotFoundError as e:
            if e.name is None or not f"{module}.".startswith(f"{e.name}."):
                raise  # raised by an import inside that module
            if not parent:
                raise LookupError(f"there is no package {part}") from None
            raise LookupError(f"{parent} has no {part}{did_you_mean(part, dir(target))}") from None
    return target


def target_of(path: str, key: str) -> Callable[..., Any]:
    """The object that a `_target_` names. Raises UserError if a config may not name it or it does not exist."""
    raise_problems(disallowed_targets({"_target_": path}, key))
    if path != moved(path):
        raise UserError(f"{key}._target_={path} was renamed to {moved(path)}. Update it.")
    try:
        target: Callable[..., Any] = locate(path)
    except LookupError as e:
        raise UserError(f"{key}._target_={path} does not exist: {e}.") from None
    if not is_allowed(target, key):
        bases = [base.split(".") for base in BASES if base.rpartition(".")[2] in (component_types(key) or ())]
        transforms = "a transform of torchvision, timm or albumentations"
        kinds = " or ".join(transforms if name == "object" else f"{library}'s {name}" for library, *_, name in bases)
        if any(qualified_name(base).startswith("pytorch_lightning.") for base in getattr(target, "__mro__", ())):
            raise UserError(
                f"{key}._target_={path} is a class of the package pytorch_lightning. Lockstep supports the package lightning, which has the "
                "same modules: replace `import pytorch_lightning` with `import lightning.pytorch`."
            )
        raise UserError(
            f"{key}._target_={path} is not allowed here: {key} accepts a subclass of "
            f"{kinds or 'Module, Optimizer, Dataset, Metric or the like'}, or a function annotated to return one, "
            "from your own packages or from the library of that class."
        )
    return target


INHERITED = object()  # the default of a parameter that a base class requires


def parameters(path: str) -> dict[str, inspect.Parameter] | None:
    """The parameters of a target by name, with those that `**kwargs` passes on to base classes; None if unknown.

    Inherited parameters have a default: the class may set them itself.
    """
    try:
        target = locate(path)
        result = signature(target)
        for init, base in pairwise(constructors(target)):
            rest = [name for name, p in result.items() if p.kind is p.VAR_KEYWORD]
            if not rest or consumes_kwargs(init, rest[0]):
                break
            inherited = list(signature(base).values())[1:]  # without `self`
            named = {k: p for k, p in result.items() if k not in rest}
            optional = {
                p.name: p.replace(default=INHERITED) if p.default is p.empty and accepts_keyword(p) else p
                for p in inherited
            }
            result = optional | named
    except (LookupError, TypeError, ValueError):
        return None
    return result


@dataclass(frozen=True)
class Source:
    """The source of a class or function, and of the module that defines it."""

    node: ast.ClassDef | ast.FunctionDef
    module: str
    tree: ast.Module


def statements(tree: ast.Module | ast.If | ast.Try) -> Iterator[ast.stmt]:
    """The statements of a module, including those inside `if TYPE_CHECKING` and the like."""
    for node in tree.body:
        yield from statements(node) if isinstance(node, ast.If | ast.Try) else [node]


@cache
def find_source(path: str) -> Source | None:
    """The source of a class or function, without importing it; None if its path and imports do not lead to it."""
    module, _, name = path.rpartition(".")
    package, *rest = module.split(".")
    spec = find_spec(package) if package else None
    if spec is None or spec.origin is None:
        return None
    is_module = not rest and spec.submodule_search_locations is None  # at the top level
    base = Path(spec.origin).with_suffix("") if is_module else Path(spec.origin).parent.joinpath(*rest)
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    parent = module if base.is_dir() else module.rpartition(".")[0]
    try:
        tree = ast.parse(file.read_bytes()) if file.is_file() else ast.Module([], [])
    except (SyntaxError, ValueError):  # the import shows it as the user's
        return None
    match: Source | str | None = None  # the last definition, or where it is imported from
    for node in statements(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            match = Source(node, module, tree)
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if name == (alias.asname or alias.name):
                match = f"{resolve_name('.' * node.level + (node.module or ''), parent)}.{alias.name}"  # type: ignore[attr-defined]
    return match if not isinstance(match, str) else find_source(match) if match != path else None


def full_path(name: str, origin: Source) -> str:
    """The full path of a dotted name used in a module: imported there, or else defined there."""
    first, dot, rest = name.partition(".")
    for node in statements(origin.tree):
        if isinstance(node, ast.Import):
            for alias in (alias for alias in node.names if (alias.asname or alias.name).split(".")[0] == first):
                return f"{alias.name if alias.asname else first}{dot}{rest}"
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in (alias for alias in node.names if first == (alias.asname or alias.name)):
                return f"{node.module}.{alias.name}{dot}{rest}"
    return f"{origin.module}.{name}"


@cache
def source_bases(path: str) -> list[str] | None:
    """The homes of a class and its bases, up to those in BASES, read from the source; None if the source lacks any."""
    cls = find_source(path)
    if cls is None or isinstance(cls.node, ast.FunctionDef):
        return None
    homes = [f"{cls.module}.{cls.node.name}"]
    if homes[0] in BASES:
        return homes
    for base in (full_path(ast.unparse(base), cls) for base in cls.node.bases):
        inherited = source_bases(base) if base != homes[0] else None
        if inherited is None:
            return None
        homes += inherited
    return homes


def imports_no_torch(path: str) -> bool:
    """Whether the file of a class imports only the standard library, NumPy, Pillow and LIGHT modules of Lockstep."""
    cls, names = find_source(path), list[str]()
    for node in statements(cls.tree) if cls else ():
        if isinstance(node, ast.Import | ast.ImportFrom):
            parent = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names += [f"{parent}{alias.name}" for alias in node.names]
    homes = [f"{PUBLIC.get(name, name)}." for name in names]
    own = [home for home in homes if home.split(".")[0] not in sys.stdlib_module_names]
    return cls is not None and all(home.startswith(LIGHT) and not home.startswith(HEAVY) for home in own)


def signature(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function. Annotations become types, unless one of them exists only for type checkers."""
    constructor: Any = function
    try:
        types = typing.get_type_hints(constructor.__init__ if isinstance(function, type) else function)
    except Exception:
        types = {}
    named = inspect.signature(function).parameters
    return {name: p.replace(annotation=types.get(name, p.annotation)) for name, p in named.items()}


def accepts_keyword(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def constructors(target: Any) -> list[Callable[..., Any]]:
    """The `__init__` of a class and of its base classes, in the order of `super()` calls."""
    classes = getattr(target, "__mro__", (object,))[:-1]
    return [vars(cls)["__init__"] for cls in classes if "__init__" in vars(cls)]


def consumes_kwargs(constructor: Callable[..., Any], rest: str) -> bool:
    """Whether a constructor passes its `**rest` to no other constructor, so it may use any of the names itself."""
    try:
        parts = ast.walk(ast.parse(f"if True:\n{inspect.getsource(constructor)}"))  # a method is indented
    except (OSError, TypeError, SyntaxError):  # without source
        return False
    calls = [node for node in parts if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("__init__")]
    uses = [node for call in calls for node in ast.walk(call) if isinstance(node, ast.Name) and node.id == rest]
    return not (uses or constructor.__module__.startswith("lightning."))  # LightningDataModule drops them


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

    try:
        parsed = TypeAdapter(annotation, config={"arbitrary_types_allowed": True}).validate_python(value)
        is_wrong = isinstance(value, str | bool) and isinstance(parsed, int | float) and type(parsed) is not type(value)
    except ValidationError:
        is_wrong = True
    except Exception:  # pydantic does not support the annotation, or the annotated type has its own pydantic config
        return
    if is_wrong:
        name = getattr(annotation, "__name__", None) if isinstance(annotation, type) else None
        yield f"{key}={to_text(value)} is invalid; expected {name or str(annotation).replace('typing.', '')}."
