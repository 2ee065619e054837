"""What the source of a class or function says, without importing it: where it is defined, its base classes, its arguments.

So names and arguments are judged before torch is imported, those of the user's own classes as well. `None` means that only an import
can tell: the name is made while its module runs, or a decorator changes the signature.
"""

import ast
import builtins
import importlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from inspect import Parameter
from pathlib import Path
from typing import Any

from lockstep.config.words import nearest

PLAIN = ("typing", "collections.abc", "pathlib")  # modules that annotations may name
LINKS = 12  # of a chain of imports from one module to the next
MOST_STARS = 8  # `from module import *`; reading timm.models with its 90 would take longer than a typo may
# Base classes that need no reading, as their files are large. Those with True take arguments from their subclasses.
ENDS = {
    "lightning.pytorch.callbacks.callback.Callback": False,
    "lightning.pytorch.core.datamodule.LightningDataModule": False,
    "lightning.pytorch.core.module.LightningModule": False,
    "lightning.pytorch.strategies.strategy.Strategy": True,
    "torch.nn.modules.module.Module": False,
    "torch.optim.optimizer.Optimizer": True,
    "torchmetrics.metric.Metric": True,
}


@dataclass(frozen=True)
class Module:
    """The names that a module defines: classes and functions, the dotted paths of what it imports, None for the rest."""

    name: str
    names: dict[str, Any] = field(default_factory=dict)
    stars: tuple[str, ...] = ()  # modules of `from module import *`


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Also those within `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from statements([*node.body, *node.orelse])


@cache
def read(name: str, file: Path) -> Module:
    """Raises SyntaxError, OSError or ValueError if the file cannot be read as Python."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    names: dict[str, Any] = {}
    stars = []
    for node in statements(ast.parse(file.read_bytes()).body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname}
            names |= {a.name.split(".")[0]: a.name.split(".")[0] for a in node.names if not a.asname}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            names |= {a.asname or a.name: f"{origin}.{a.name}" for a in node.names if a.name != "*"}
            stars += [origin for a in node.names if a.name == "*"]
        elif isinstance(node, ast.Assign):
            names |= {target.id: None for target in node.targets if isinstance(target, ast.Name)}
    return Module(name, names, tuple(stars))


def find(path: str, links: int = LINKS) -> tuple[Module, Any] | None:
    """The definition of a dotted path and its module. Raises LookupError if there is none."""
    if path in ENDS:
        module, _, name = path.rpartition(".")
        return Module(module), ast.parse(f"class {name}: pass").body[0]
    name, *rest = path.split(".")
    try:
        if (spec := find_spec(name)) is None:
            raise LookupError(f"there is no package {name}")
        folders, file = (
            spec.submodule_search_locations,
            Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None,
        )
        return find_in(name, file, Path(folders[0]) if folders else None, rest, links)
    except (SyntaxError, OSError, ValueError):
        return None


def find_in(
    name: str, file: Path | None, folder: Path | None, parts: list[str], links: int
) -> tuple[Module, Any] | None:
    module = read(name, file) if file else Module(name)
    if not parts or not links:
        return None
    part, *later = parts
    what, inner = module.names.get(part, LookupError), f"{name}.{part}."
    if isinstance(what, str) and not f"{what}.".startswith(inner):
        return find(".".join([what, *later]), links - 1)
    if isinstance(what, str):  # its own module of that name, or a name in it
        later = [*filter(None, what[len(inner) :].split(".")), *later]
    elif isinstance(what, ast.AST | None):
        return (module, what) if what and not later else None
    below = folder / part if folder else Path()
    for found in (below / "__init__.py", below.with_name(f"{part}.py")) if folder else ():
        if found.is_file():
            return find_in(inner[:-1], found, below, later, links - 1)
    for star in module.stars[:MOST_STARS]:
        with suppress(LookupError):
            return find(".".join([star, *parts]), links - 1)
    if file is None or "__getattr__" in module.names or len(module.stars) > MOST_STARS or below.is_dir():
        return None
    raise LookupError(f"{name} has no {part}{nearest(part, list(module.names))}")


def refers(module: Module, expression: ast.expr) -> str | None:
    """The dotted path of what a name in a module means."""
    expression = expression.value if isinstance(expression, ast.Subscript) else expression  # such as Generic[T]
    text = expression.value if isinstance(expression, ast.Constant) else ast.unparse(expression)
    first, *rest = str(text).split(".")
    origin = module.names.get(first, f"builtins.{first}" if hasattr(builtins, first) else None)
    return ".".join([f"{module.name}.{first}" if isinstance(origin, ast.AST) else origin, *rest]) if origin else None


def bases(module: Module, node: ast.ClassDef) -> Iterator[tuple[Module, Any] | None]:
    for path in (refers(module, base) for base in node.bases):
        if path is None or not path.startswith(("builtins.", "typing.", "abc.")):
            found = None
            with suppress(LookupError):
                found = find(path) if path else None
            yield found if found and isinstance(found[1], ast.ClassDef) else None


def kinds(module: Module, node: Any) -> tuple[str, set[str] | None, bool] | None:
    """Where a class or function is defined, the paths of the class (or of what a function says it returns; None: it does not say) and
    of its bases, and whether all are known."""
    where = f"{module.name}.{node.name}"
    if isinstance(node, ast.ClassDef):
        above = [kinds(*base) if base else None for base in bases(module, node)]
        paths = {where, "builtins.object"}.union(*(each[1] or () for each in above if each))
        return where, paths, all(each and each[2] for each in above)
    path = refers(module, node.returns) if node.returns else "builtins.None"
    if node.decorator_list or path is None:
        return None
    if path.startswith(("builtins.", "typing.")):
        return where, None, True
    with suppress(LookupError):
        if (made := find(path)) and isinstance(made[1], ast.ClassDef) and (described := kinds(*made)):
            return where, *described[1:]
    return None


def constructors(module: Module, node: ast.ClassDef) -> Iterator[tuple[Module, ast.FunctionDef] | None]:
    """The `__init__` of a class and of its base classes, nearest first; None where it is not known."""
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    if node.decorator_list or node.keywords or "__new__" in methods or ENDS.get(f"{module.name}.{node.name}"):
        yield None
    if "__init__" in methods:
        yield module, methods["__init__"]
    for base in bases(module, node):
        yield from constructors(*base) if base else [None]


def arguments(module: Module, node: Any) -> dict[str, Parameter] | None:
    """The arguments of a class or function by name, with those that `**kwargs` passes on to base classes.

    Inherited arguments are optional: the class may set them itself.
    """
    if isinstance(node, ast.FunctionDef):
        return None if node.decorator_list else signature(module, node)
    taken: dict[str, Parameter] | None = {}
    for place, found in enumerate(constructors(module, node)):
        if place and not any(p.kind is p.VAR_KEYWORD for p in (taken or {}).values()):
            break
        if found is None:
            return taken if place else None
        _, *above = signature(*found).values()  # without `self`
        own = {name: p for name, p in (taken or {}).items() if p.kind is not p.VAR_KEYWORD}
        taken = {p.name: p.replace(default=None) if place and takes_one(p) else p for p in above} | own
    return taken


def signature(module: Module, function: ast.FunctionDef) -> dict[str, Parameter]:
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    found: list[tuple[ast.arg, ast.expr | None, Any]]
    found = [(a, d, Parameter.POSITIONAL_OR_KEYWORD) for a, d in zip(positional, defaults, strict=True)]
    found += [(a, None, Parameter.VAR_POSITIONAL) for a in [args.vararg] if a]
    found += [(a, d, Parameter.KEYWORD_ONLY) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    found += [(a, None, Parameter.VAR_KEYWORD) for a in [args.kwarg] if a]
    values = ((a, Parameter.empty if d is None else ..., kind) for a, d, kind in found)
    return {
        a.arg: Parameter(a.arg, kind, default=d, annotation=annotation(module, a.annotation)) for a, d, kind in values
    }


def takes_one(parameter: Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def annotation(module: Module, expression: ast.expr | None) -> Any:
    """An annotation as a type, if it consists of Python's own types; otherwise none."""
    names: dict[str, Any] = {"__builtins__": {n: v for n, v in vars(builtins).items() if isinstance(v, type)}}
    try:
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            expression = ast.parse(expression.value, mode="eval").body
        for node in ast.walk(expression) if expression else ():
            library, _, name = str(module.names.get(node.id) if isinstance(node, ast.Name) else "").rpartition(".")
            if library in PLAIN:
                names[name] = getattr(importlib.import_module(library), name)
        return eval(compile(ast.Expression(expression), module.name, "eval"), names) if expression else Parameter.empty
    except Exception:  # it names other types
        return Parameter.empty
