"""The arguments and their types of a class or function named by a config, including those of base classes."""

import contextlib
import importlib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from lockstep.config import admitted
from lockstep.config.admitted import is_shipped
from lockstep.config.schema import KEYS
from lockstep.config.words import nearest, shown


def locate(path: str) -> Any:
    """The object of a dotted path. Raises LookupError if there is none; lets errors of the modules themselves through.

    Imports only what a config may name, as importing a module runs it.
    As in Hydra, a package's attribute comes before its module of the same name: `lockstep.strategies.parallelize` is a function.
    """
    if not path.startswith(admitted.trusted()):
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


def parameters(path: str) -> dict[str, inspect.Parameter] | None:
    """The arguments of a target by name, with those that `**kwargs` passes on to base classes; None if unknown, or if there is no such target.

    Inherited arguments are optional: the class may set them itself.
    """
    try:
        target = locate(path)
        bases = iter(constructors(target)[1:])
        found = dict(inspect.signature(target).parameters)
        while (rest := [name for name, p in found.items() if p.kind is p.VAR_KEYWORD]) and (base := next(bases, None)):
            _, *inherited = inspect.signature(base).parameters.values()  # without `self`
            own = {k: p for k, p in found.items() if k not in rest}
            found = {p.name: p.replace(default=None) if takes_one(p) else p for p in inherited} | own
    except (LookupError, TypeError, ValueError):
        return None
    return found


def takes_one(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def constructors(target: Any) -> list[Callable[..., Any]]:
    """The `__init__` of a class and of its base classes, in the order in which `super()` finds them."""
    classes = getattr(target, "__mro__", (object,))[:-1]
    return [vars(each)["__init__"] for each in classes if "__init__" in vars(each)]


def accepted(path: str, offered: Mapping[str, Any]) -> dict[str, Any]:
    """The `offered` arguments that the signature of a target names."""
    named = parameters(path)
    return {name: value for name, value in offered.items() if named is not None and name in named}


def type_problem(target: str, parameter: inspect.Parameter, key: str, value: Any) -> Iterator[str]:
    """Whether the annotation of an argument accepts a value; an argument without annotation accepts any."""
    if parameter.annotation is inspect.Parameter.empty or has_target(value):
        return
    if key in KEYS and is_shipped({"_target_": target}):
        return  # config/checks.py has better words
    from pydantic import TypeAdapter, ValidationError  # 0.1 s, which --help need not wait for

    try:
        annotation = hints(target).get(parameter.name, parameter.annotation)
        config: Any = None if is_model(annotation) else {"arbitrary_types_allowed": True}
        adapter: TypeAdapter[Any] = TypeAdapter(annotation, config=config)
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


def is_model(annotation: Any) -> bool:
    """Types with their own pydantic settings accept no others."""
    known = hasattr(annotation, "__pydantic_config__") or typing.is_typeddict(annotation)
    return isinstance(annotation, type) and known


def has_target(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(map(has_target, value.values()))
    return isinstance(value, list) and any(map(has_target, value))


def hints(target: str) -> dict[str, Any]:
    """Annotations as types, also those written as strings; without those that only a type checker understands."""
    found: Any = locate(target)
    functions = constructors(found) if isinstance(found, type) else [found]
    types: dict[str, Any] = {}
    for function in reversed(functions):
        for name, written in getattr(function, "__annotations__", {}).items():
            alone: Any = SimpleNamespace(__annotations__={name: written})  # so an unreadable one hides no other
            with contextlib.suppress(Exception):
                types |= typing.get_type_hints(alone, getattr(function, "__globals__", {}))
    return types
