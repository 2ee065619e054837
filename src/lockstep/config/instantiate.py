"""Objects from the nodes of a config. Keys are checked against the signature of the class or function that gets them.

What may be made is listed, so that a config or a checkpoint cannot run any code.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lockstep.config import project
from lockstep.config.signatures import locate, parameters, takes_one, type_problem
from lockstep.config.words import nearest
from lockstep.errors import UserError, raise_problems

# What configs may name, and what those may return; beside it, the packages of the project (config/project.py).
TRUSTED = (
    "lockstep.*",
    "torch.nn.*",
    "torch.optim.*",
    "torchvision.*",
    "torchmetrics.*",
    "timm.*",
    "lightning.pytorch.*",
    "optuna.pruners.*",
)
SPECIAL = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")  # Hydra's
# Keys of a node that the engine reads itself. They are passed on only where the signature names them.
ENGINE = {
    "task": ("name", "monitor", "mode", "metrics"),
    "model": ("name",),
    "data": ("name",),
    "strategy": ("name", "traits"),
}
PARTIAL = ("optim", "schedule")  # the engine adds parameters or the optimizer, and makes the object
MISSING = "???"  # OmegaConf's


def create(node: Mapping[str, Any], key: str, **given: Any) -> Any:
    """The object of a `_target_` node; `given` are arguments of the engine's. `key` is where the node stands.

    Raises:
        UserError: a key is unknown, missing or of a wrong type, or the target may not be named.
        Exception: what the class itself raises.
    """
    plain = {**to_plain(node), **({"_partial_": True} if key in PARTIAL else {})}
    raise_problems(problems(plain, key, given=given))
    named = parameters(plain["_target_"])
    kept = {k: v for k, v in plain.items() if k not in ENGINE.get(key, ()) or (named is not None and k in named)}
    try:
        return instantiate(kept, **given, _execution_whitelist_=list(trusted()), _convert_="all")
    except InstantiationException as e:
        raise (e.__cause__ or UserError(f"{key}: {' '.join(str(e).split())}")) from None
    except TypeError as e:
        raise_problems(refused_argument(e, kept, key))
        raise


def refused_argument(error: TypeError, node: Mapping[str, Any], key: str) -> Iterator[str]:
    """A key that a class took as one of **arguments and passed on to another one, which does not know it."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if found and found[1] in node and found[1] not in (parameters(node["_target_"]) or {}):
        yield f"{key}.{found[1]} is not an argument of {node['_target_']}{nearest(found[1], list(parameters(node['_target_']) or {}))}."


# Keys of a `data` node that the engine reads; the class gets the others, and those of them that it names.
ENGINE_DATA = (
    "batch_size",
    "eval_batch_size",
    "val_fraction",
    "limit_train",
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "on_device",
)


def has_own_loaders(cfg: DictConfig) -> bool:
    """Whether `data` names a LightningDataModule, whose dataloaders are its own; asked without importing Lightning."""
    path = cfg.data.get("_target_")
    target = target_of(path, "data") if isinstance(path, str) else None
    return any(base.__module__.startswith("lightning.pytorch.") for base in getattr(target, "__mro__", ()))


def data_set_node(cfg: DictConfig) -> dict[str, Any]:
    """The `data` node without the engine's keys, except those that the class names as well.

    Raises:
        UserError: there is no such class, or it finds something wrong with the node.
    """
    node = to_plain(cfg.data)
    raise_problems(target_problems(node, "data"))
    raise_problems(getattr(target_of(node["_target_"], "data"), "problems", lambda _: ())(node))
    named = parameters(node["_target_"]) or {}
    return {key: value for key, value in node.items() if key not in ENGINE_DATA or key in named}


def create_data(cfg: DictConfig) -> Any:
    """The data set of a config, without its batches."""
    return create(data_set_node(cfg), "data")


def trusted() -> tuple[str, ...]:
    project.make_importable()
    return (*TRUSTED, *project.trusted())


def to_plain(node: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(node, DictConfig):
        content: Any = OmegaConf.to_container(node, resolve=True)
        return {str(key): value for key, value in content.items()}
    return dict(node)


def target_of(path: str, key: str) -> Callable[..., Any]:
    """What a `_target_` names. Raises UserError that says what may be named, or what is not there."""
    if not any(path.startswith(pattern.removesuffix("*")) for pattern in trusted()):
        allowed = ", ".join(pattern.removesuffix(".*") for pattern in trusted())
        raise UserError(
            f"{key}._target_={path} may not be named by a config; packages that may: {allowed}. "
            "Packages below src/ of your project are among them; list others in [tool.lockstep] packages of its pyproject.toml."
        )
    try:
        found: Callable[..., Any] = locate(path)
    except LookupError as e:
        raise UserError(f"{key}._target_={path} is not there: {e}.") from None
    return found


def target_problems(node: Mapping[str, Any], key: str) -> Iterator[str]:
    """Whether a node names a class that is there and may be made."""
    target = node.get("_target_")
    if target in (None, MISSING):
        yield f"{key}._target_ is missing; it names the class, as in {key}._target_=my_package.my_module.MyClass."
        return
    try:
        target_of(str(target), key)
    except UserError as e:
        yield from e.problems


def problems(node: Mapping[str, Any], key: str, *, given: Mapping[str, Any] | None = None) -> Iterator[str]:
    """What is wrong with the keys of a node. Without `given`, arguments that the engine adds are not missed."""
    if wrong := list(target_problems(node, key)):
        yield from wrong
        return
    target: str = node["_target_"]
    named = parameters(target)
    if named is None:
        return
    kinds = {parameter.kind for parameter in named.values()}
    own = [name for name in node if name not in (*SPECIAL, *ENGINE.get(key, ()))]
    known = [name for name, parameter in named.items() if takes_one(parameter)]
    for name in own:
        if name in known:
            yield from type_problem(target, named[name], f"{key}.{name}", node[name])
        elif inspect.Parameter.VAR_KEYWORD not in kinds:
            yield f"{key}.{name} is not an argument of {target}{nearest(name, known)}; it takes {', '.join(known) or 'none'}."
    if given is not None and not node.get("_partial_"):
        for name in known:
            if named[name].default is inspect.Parameter.empty and name not in node and name not in given:
                offered = f" The data and the task offer {', '.join(given)}." if given else ""
                yield f"{key}.{name} is missing: {target} needs it. Type +{key}.{name}=<value>.{offered}"
