"""What a config may name at which key, and the arguments of what it names. Free of torch."""

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

from lockstep import PACKAGE
from lockstep.config import project
from lockstep.config.renames import MOVED
from lockstep.config.words import shown
from lockstep.errors import UserError, did_you_mean, raise_problems

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
    "albumentations.",
    "lightning.pytorch.",
    "optuna.pruners.",
)
# Each base, and the libraries' modules that may define its subclasses. Those of Lockstep and of the project always may.
BASES: dict[str, tuple[str, ...]] = {
    "lockstep.training.task.Task": (),
    "lockstep.data.dataset.DataSet": (),
    "lockstep.data.dataset.Arrays": (),
    "lockstep.augment.operation.Operation": (),
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
    "builtins.object": (  # no base in common; each only changes samples
        "torchvision.transforms.", "timm.data.auto_augment.", "timm.data.random_erasing.", "timm.data.transforms.",
        "albumentations.augmentations.", "albumentations.core.composition.",
    ),
}  # fmt: skip
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # its import looks for a newer version online
CLASS = "my_package.my_module.MyClass"  # in messages
LIGHT = ("numpy.", "PIL.", "lockstep.data.", "lockstep.errors.", "lockstep.machine.")  # modules that import no torch
FUNCTIONS = ("timm.data.auto_augment.",)  # each makes a transform, and says not of what type
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
    "augment.*": ("Operation", "object"),
    "callbacks.*": ("Callback",),
    "logger.*": ("Logger",),
}


def trusted() -> tuple[str, ...]:
    """The beginnings of names that may be looked up."""
    project.make_importable()
    return tuple(dict.fromkeys([*TRUSTED, *(f"{package}." for package in project.current().packages)]))


def kinds_of(key: str) -> tuple[str, ...] | None:
    """The kinds of a key; None for a node within another one."""
    return KINDS.get(key) or KINDS.get(f"{key.rpartition('.')[0]}.*")


def home(target: Any) -> str:
    """Where a class or function is defined, whatever name it was found by."""
    return f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def may_name(target: Any, key: str) -> bool:
    """Whether a config may name `target` at `key`. Calls nothing."""
    while isinstance(target, partial):
        target = target.func
    where, kinds = home(target), kinds_of(key)
    # a checkout has Lockstep's own packages among those of the project
    own = tuple(f"{name}." for name in project.current().packages if name not in (PACKAGE.name, "hydra_plugins"))
    if where.startswith(UNPICKLING) or not callable(target):
        return False
    if where.startswith((*own, *FUNCTIONS)) and (kinds is None or "object" in kinds):
        return True
    made = target
    if not isinstance(target, type):
        try:
            made = typing.get_type_hints(getattr(target, "__func__", target)).get("return")
        except Exception:  # another annotation of it, such as one under TYPE_CHECKING
            made = None
        if not isinstance(made, type) or made is Any:
            return where.startswith(own)
    bases = {home(base) for base in made.__mro__}
    return any(
        base in bases
        and where.startswith(modules if base == "builtins.object" else (*modules, f"{PACKAGE.name}.", *own))
        for base, modules in BASES.items()
        if kinds is None or base.rpartition(".")[2] in kinds
    )


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


def unnamed(node: Any, key: str) -> Iterator[str]:
    """Why a node names no class: it is not a node, or its `_target_` is missing or not a dotted name."""
    target = node.get("_target_") if isinstance(node, Mapping) else None
    if not isinstance(node, Mapping):
        yield f"{key}={shown(node)} is invalid: it names a class and its arguments. For example: {key}={{_target_: {CLASS}}}."
    elif target in (None, "???"):
        yield f"{key}._target_ is missing; it names the class, for example {key}._target_={CLASS}."
    elif not isinstance(target, str) or "." not in target.strip("."):
        yield f"{key}._target_={shown(target)} is invalid; it names a class, for example {key}._target_={CLASS}."


def foreign_names(value: Any, key: str) -> Iterator[str]:
    """Names in a node, and in those within it, that no config may name. Imports nothing."""
    allowed = trusted()
    for place, node in nodes(value, key):
        path = node["_target_"]
        if str(path).startswith("pytorch_lightning."):
            yield f"{place}._target_={path} is of the package pytorch_lightning. Lockstep has those of lightning: lightning.pytorch{path.removeprefix('pytorch_lightning')}."
        elif isinstance(path, str) and "." in path and not path.startswith(allowed):
            yield (
                f"{place}._target_={path} may not be named by a config; packages that may: {', '.join(allowed).replace('.,', ',').removesuffix('.')}. "
                "They include the packages and modules in src/ of your project. To allow another one, add it to [tool.lockstep] packages in its pyproject.toml."
            )


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
            raise LookupError(f"{here} has no {part}{did_you_mean(part, dir(found))}") from None
    return found


def target_of(path: str, key: str) -> Callable[..., Any]:
    """The object that a `_target_` names. Raises UserError if it may not be named or does not exist."""
    raise_problems(foreign_names({"_target_": path}, key))
    if path in MOVED:
        raise UserError(f"{key}._target_={path} is {MOVED[path]} now. Change it.")
    try:
        target: Callable[..., Any] = locate(path)
    except LookupError as e:
        raise UserError(f"{key}._target_={path} does not exist: {e}.") from None
    if not may_name(target, key):
        bases = [base.split(".") for base in BASES if base.rpartition(".")[2] in (kinds_of(key) or ())]
        transforms = "a transform of torchvision, timm or albumentations"
        kinds = " or ".join(transforms if name == "object" else f"{library}'s {name}" for library, *_, name in bases)
        if any(home(base).startswith("pytorch_lightning.") for base in getattr(target, "__mro__", ())):
            raise UserError(
                f"{key}._target_={path} is a class of the package pytorch_lightning. Lockstep runs those of the package lightning, which has the "
                "same modules: replace `import pytorch_lightning` by `import lightning.pytorch`."
            )
        raise UserError(
            f"{key}._target_={path} may not be named here: {key} takes a subclass of "
            f"{kinds or 'Module, Optimizer, Dataset, Metric or the like'}, or a function annotated to return one, "
            "of your own packages or of the library that it belongs to."
        )
    return target


def parameters(path: str) -> dict[str, inspect.Parameter] | None:
    """The arguments of a target by name, with those that `**kwargs` passes on to base classes; None if unknown, or if there is no such target.

    Inherited arguments are optional: the class may set them itself.
    """
    try:
        target = locate(path)
        found = signature(target)
        for made, base in pairwise(constructors(target)):
            if not (rest := [name for name, p in found.items() if p.kind is p.VAR_KEYWORD]) or keeps(made, rest[0]):
                break
            inherited = list(signature(base).values())[1:]  # without `self`
            own = {k: p for k, p in found.items() if k not in rest}
            found = {p.name: p.replace(default=None) if takes_one(p) else p for p in inherited} | own
    except (LookupError, TypeError, ValueError):
        return None
    return found


@dataclass(frozen=True)
class Source:
    """The source of a class or function, and of the module that defines it."""

    node: ast.ClassDef | ast.FunctionDef
    module: str
    tree: ast.Module

    @property
    def home(self) -> str:
        return f"{self.module}.{self.node.name}"


def statements(tree: ast.Module | ast.If | ast.Try) -> Iterator[ast.stmt]:
    """Those of a module, also within `if TYPE_CHECKING` and the like."""
    for node in tree.body:
        yield from statements(node) if isinstance(node, ast.If | ast.Try) else [node]


@cache
def source(path: str) -> Source | None:
    """The source of a class or function, found without importing it; None if it is not where its path and the imports there lead."""
    module, _, name = path.rpartition(".")
    package, *rest = module.split(".")
    spec = find_spec(package) if package else None
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin).parent.joinpath(*rest)
    if not rest and spec.submodule_search_locations is None:  # a module of its own
        place = Path(spec.origin).with_suffix("")
    file, inside = (
        (place / "__init__.py", module) if place.is_dir() else (place.with_suffix(".py"), module.rpartition(".")[0])
    )
    tree = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])
    for node in statements(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return Source(node, module, tree)
        if isinstance(node, ast.ImportFrom):
            for alias in (alias for alias in node.names if name == (alias.asname or alias.name)):
                return source(f"{resolve_name('.' * node.level + (node.module or ''), inside)}.{alias.name}")
    return None


def meaning(name: str, where: Source) -> str:
    """What a dotted name stands for in a module: one that it imports, or its own."""
    first, dot, rest = name.partition(".")
    for node in statements(where.tree):
        if isinstance(node, ast.Import):
            for alias in (alias for alias in node.names if (alias.asname or alias.name).split(".")[0] == first):
                return f"{alias.name if alias.asname else first}{dot}{rest}"
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in (alias for alias in node.names if first == (alias.asname or alias.name)):
                return f"{node.module}.{alias.name}{dot}{rest}"
    return f"{where.module}.{name}"


@cache
def lineage(path: str) -> list[str] | None:
    """The homes of a class and of its bases, up to those of BASES, as its source names them; None if they are not all found there."""
    found = source(path)
    if found is None or isinstance(found.node, ast.FunctionDef):
        return None
    if found.home in BASES:
        return [found.home]
    homes = [found.home]
    for base in found.node.bases:
        inherited = lineage(meaning(ast.unparse(base), found))
        if inherited is None:
            return None
        homes += inherited
    return homes


def imports_no_torch(path: str) -> bool:
    """Whether the file of a class imports nothing but Python's own modules, NumPy, Pillow, and what Lockstep has of data."""
    found, names = source(path), list[str]()
    for node in statements(found.tree) if found else ():
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    light = (name.split(".")[0] in sys.stdlib_module_names or f"{name}.".startswith(LIGHT) for name in names)
    return found is not None and all(light)


def written_arguments(path: str) -> list[str] | None:
    """The arguments in the source of a class or function; None if it passes on others, or is not found."""
    homes = lineage(path) or [path]
    for found in filter(None, map(source, homes)):
        own = found.node.body if isinstance(found.node, ast.ClassDef) else [found.node]
        for each in own:
            if isinstance(each, ast.FunctionDef) and (each is found.node or each.name == "__init__"):
                names = [arg.arg for arg in (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs)]
                return None if each.args.kwarg else names[each is not found.node :]
    return None


def written_value(path: str, name: str) -> Any:
    """A plain attribute in the source of a class or of its bases; None if it is not there."""
    for found in filter(None, map(source, lineage(path) or [path])):
        for each in found.node.body:
            target = each.targets[0] if isinstance(each, ast.Assign) else getattr(each, "target", None)
            value = getattr(each, "value", None)
            if target is not None and ast.unparse(target) == name:
                return value.value if isinstance(value, ast.Constant) else None
    return None


def signature(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Its arguments. Annotations are types, also those written as text, unless only a type checker understands one of them."""
    constructor: Any = function
    try:
        types = typing.get_type_hints(constructor.__init__ if isinstance(function, type) else function)
    except Exception:
        types = {}
    found = inspect.signature(function).parameters
    return {name: p.replace(annotation=types.get(name, p.annotation)) for name, p in found.items()}


def takes_one(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def constructors(target: Any) -> list[Callable[..., Any]]:
    """The `__init__` of a class and of its base classes, in the order in which `super()` finds them."""
    classes = getattr(target, "__mro__", (object,))[:-1]
    return [vars(each)["__init__"] for each in classes if "__init__" in vars(each)]


def keeps(constructor: Callable[..., Any], rest: str) -> bool:
    """Whether it gives its `**rest` to no other constructor, so any name may be meant for itself."""
    try:
        parts = ast.walk(ast.parse(f"if True:\n{inspect.getsource(constructor)}"))  # a method is indented
    except (OSError, TypeError, SyntaxError):  # without source
        return False
    calls = [each for each in parts if isinstance(each, ast.Call) and ast.unparse(each.func).endswith("__init__")]
    given = [each for call in calls for each in ast.walk(call) if isinstance(each, ast.Name) and each.id == rest]
    return not (given or constructor.__module__.startswith("lightning."))  # whose data module drops them


def accepted(path: str, offered: Mapping[str, Any]) -> dict[str, Any]:
    """The `offered` arguments that the signature of a target names."""
    named = parameters(path)
    return {name: value for name, value in offered.items() if named is not None and name in named}


def type_problem(parameter: inspect.Parameter, key: str, value: Any) -> Iterator[str]:
    """Whether the annotation of an argument accepts a value; an argument without annotation accepts any."""
    annotation = parameter.annotation
    if annotation is parameter.empty or isinstance(annotation, str) or any(nodes(value, key)):
        return
    from pydantic import TypeAdapter, ValidationError  # 0.1 s, which --help need not wait for

    try:
        found = TypeAdapter(annotation, config={"arbitrary_types_allowed": True}).validate_python(value)
        wrong = isinstance(value, str | bool) and isinstance(found, int | float) and type(found) is not type(value)
    except ValidationError:
        wrong = True
    except Exception:  # annotations that pydantic does not understand, or with settings of their own
        return
    if wrong:
        name = getattr(annotation, "__name__", None) if isinstance(annotation, type) else None
        yield f"{key}={shown(value)} is invalid; expected {name or str(annotation).replace('typing.', '')}."
