"""Creates objects from config nodes. Keys are checked against the signature of the class or function that gets them."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lockstep.config import targets
from lockstep.config.targets import accepted, is_shipped, locate, parameters, takes_one, type_problem
from lockstep.config.words import shown
from lockstep.errors import UserError, did_you_mean, raise_problems

if TYPE_CHECKING:
    from torch import nn

# --- Creates objects from config nodes. Keys are checked against the signature of the class or function that gets them ---
#
# Only classes of a key's kind may be named (config/targets.py), so a config or a checkpoint cannot run arbitrary code.

SPECIAL = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")  # Hydra's
# Keys of a node that the engine reads itself. They are passed on only if the signature names them.
ENGINE = {
    "task": ("name", "monitor", "mode", "metrics", "traits"),
    "model": ("name",),
    "data": ("name",),
    "strategy": ("name",),
    "schedule": ("needs_end",),
    "optim": ("no_decay", "layer_decay", "head_lr"),
}
PARTIAL = ("optim", "schedule")  # the engine adds parameters or the optimizer, and makes the object
MISSING = "???"  # OmegaConf's


def create(node: Mapping[str, Any], key: str, **given: Any) -> Any:
    """Creates the object of a `_target_` node. `given` are arguments from the engine; `key` is the node's place in the config.

    Raises:
        UserError: a key is unknown, missing or has a wrong type, or the target may not be named.
        Exception: whatever the class itself raises.
    """
    plain = {**to_plain(node), **({"_partial_": True} if key in PARTIAL else {})}
    raise_problems(problems(plain, key, given=given))
    if "${" in str(plain):  # Hydra would resolve it, and find nodes that were not checked
        raise UserError(f"{key} holds an interpolation in an escaped form: {shown(plain)}. Write its value.")
    named = parameters(plain["_target_"])
    kept = {k: v for k, v in plain.items() if k not in ENGINE.get(key, ()) or (named is not None and k in named)}
    try:
        return instantiate(
            kept, **given, _execution_whitelist_=[f"{prefix}*" for prefix in targets.trusted()], _convert_="all"
        )
    except InstantiationException as e:
        raise (e.__cause__ or UserError(f"{key}: {' '.join(str(e).split())}")) from None
    except ValueError as e:
        if isinstance(e, UserError) or not is_shipped(plain):
            raise
        joint = "." if str(e).partition("=")[0] in kept else ": "  # a message may begin with the argument
        raise UserError(f"{key}{joint}{e}") from None
    except TypeError as e:
        raise_problems(refused_argument(e, kept, key))
        raise


def refused_argument(error: TypeError, node: Mapping[str, Any], key: str) -> Iterator[str]:
    """A key that a class accepted in **kwargs and passed on to a callee that does not know it."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if found and found[1] in node and found[1] not in (parameters(node["_target_"]) or {}):
        known = [*(parameters(node["_target_"]) or {}), *ENGINE.get(key, ())]
        yield f"{key}.{found[1]} is not an argument of {node['_target_']}{did_you_mean(found[1], known)}."


# Keys of a `data` node that the engine reads. The class gets the others, and those of these that its signature names.
ENGINE_DATA = (
    "batch_size",
    "eval_batch_size",
    "val_fraction",
    "folds",
    "fold",
    "limit_train",
    "balance",
    "repeats",
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "on_device",
)


def has_own_loaders(cfg: DictConfig) -> bool:
    """Whether `data` names a LightningDataModule, which has its own dataloaders; found out without importing Lightning."""
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
    """Creates the data set of a config, without its dataloaders."""
    return create(data_set_node(cfg), "data")


def to_plain(node: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(node, DictConfig):
        content: Any = OmegaConf.to_container(node, resolve=True)
        return {str(key): value for key, value in content.items()}
    return dict(node)


def target_of(path: str, key: str) -> Callable[..., Any]:
    """The object that a `_target_` names. Raises UserError if it may not be named or does not exist."""
    if not path.startswith(targets.trusted()):
        allowed = ", ".join(prefix.removesuffix(".") for prefix in targets.trusted())
        raise UserError(
            f"{key}._target_={path} may not be named by a config; packages that may: {allowed}. "
            "They include the packages in src/ of your project. To allow another one, add it to [tool.lockstep] packages in its pyproject.toml."
        )
    try:
        found: Callable[..., Any] = locate(path)
    except LookupError as e:
        raise UserError(f"{key}._target_={path} does not exist: {e}.") from None
    if refusal := targets.refusal(found, path, key):
        raise UserError(refusal)
    return found


def target_problems(node: Mapping[str, Any], key: str) -> Iterator[str]:
    """Problems of a node's `_target_`: it is missing, may not be named, or does not exist."""
    target = node.get("_target_")
    if target in (None, MISSING):
        yield f"{key}._target_ is missing; it names the class, for example {key}._target_=my_package.my_module.MyClass."
        return
    try:
        target_of(str(target), key)
    except UserError as e:
        yield from e.problems


def problems(node: Mapping[str, Any], key: str, *, given: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Problems of the keys of a node. If `given` is None, missing arguments are not reported, as the engine may add them."""
    places = {key: node, **dict(targets.nodes(node, key))}  # it may have no `_target_` itself
    if wrong := [problem for place, each in places.items() for problem in target_problems(each, place)]:
        yield from wrong
        return
    target: str = node["_target_"]
    named = parameters(target)
    if named is None:
        return
    forms = {parameter.kind for parameter in named.values()}
    own = [name for name in node if name not in (*SPECIAL, *ENGINE.get(key, ()))]
    known = [name for name, parameter in named.items() if takes_one(parameter)]
    for name in own:
        if name in known:
            yield from type_problem(target, named[name], f"{key}.{name}", node[name])
        elif inspect.Parameter.VAR_KEYWORD not in forms:
            meant = did_you_mean(name, [*known, *ENGINE.get(key, ())])
            yield f"{key}.{name} is not an argument of {target}{meant}; it takes {', '.join(known) or 'none'}."
    if given is not None and not node.get("_partial_"):
        for name in known:
            if named[name].default is inspect.Parameter.empty and name not in node and name not in given:
                offered = f" The data and the task offer {', '.join(given)}." if given else ""
                yield f"{key}.{name} is missing: {target} needs it. Type +{key}.{name}=<value>.{offered}"


# --- The operations of the `augment` group. Lockstep's own are free of torch, so a check makes them to check their arguments ---


def names(cfg: DictConfig, *, shipped: bool) -> list[str]:
    """Names of the nodes with a class of Lockstep's own, or with one of the user's."""
    return [str(name) for name, node in (cfg.get("augment") or {}).items() if is_shipped(node) == shipped]


def operation(cfg: DictConfig, name: str) -> Any:
    """Creates an operation. The data offers it `image_size`. Raises UserError if its arguments are wrong."""
    node = to_plain(cfg.augment[name])
    offered = accepted(str(node.get("_target_")), {"image_size": cfg.data.get("image_size")})
    return create(node, f"augment.{name}", **{key: value for key, value in offered.items() if key not in node})


def operations(cfg: DictConfig) -> dict[str, Any]:
    """All operations by name, in the order of the config."""
    return {str(name): operation(cfg, str(name)) for name in cfg.get("augment") or {}}


def mixing(cfg: DictConfig, *, shipped_only: bool = False) -> list[str]:
    """Names of the operations that mix samples with their partners."""
    known = [*names(cfg, shipped=True), *(() if shipped_only else names(cfg, shipped=False))]
    return [name for name in known if operation(cfg, name).mixes]


def operation_problems(cfg: DictConfig, _: object = None, *, shipped: bool = True) -> Iterator[str]:
    if names(cfg, shipped=shipped) and has_own_loaders(cfg):
        yield f"augment.{names(cfg, shipped=shipped)[0]} has no effect: {cfg.data._target_} makes its own batches. Type augment=none."
        return
    for name in names(cfg, shipped=shipped):
        try:
            operation(cfg, name)
        except UserError as e:
            yield from e.problems


# --- The mean and standard deviation that images are normalised with ---


def with_numbers(cfg: DictConfig) -> DictConfig:
    """`cfg` with numbers in place of data.mean=model and data.std=model, so a newer timm cannot change a resumed run."""
    if not (wanted := [key for key in ("mean", "std") if cfg.data.get(key) == "model"]):
        return cfg
    cfg = cfg.copy()
    dataset = locate(cfg.data._target_)
    network_class = locate(cfg.model._target_) if cfg.model else None
    of_network = getattr(network_class, "normalisation", lambda _: None)(cfg.model.get("name"))
    own = dataset.normalisation(to_plain(cfg.data))
    if of_network and len(of_network[0]) != len(own[0]):  # pretrained on colour images, used on grey ones
        of_network = None
    numbers = dict(zip(("mean", "std"), of_network or own, strict=True))
    for key in wanted:
        cfg.data[key] = list(numbers[key])
    return cfg


# --- The network, for the data and the task ---

WEIGHTS = ("pretrained", "checkpoint_path")  # keys that fetch weights to start from


def network(model: Mapping[str, Any], offered: Mapping[str, Any], *, with_weights: bool = True) -> "nn.Module":
    """The network of a `model` node. It gets the `offered` arguments that its signature names.

    With with_weights=False, pretrained weights are not loaded, because a checkpoint provides them.

    Raises:
        UserError: a key is unknown, missing, of a wrong type, or contradicts what is offered.
    """
    fetched = () if with_weights else [key for key in WEIGHTS if key in model]
    skipped = {key: False if isinstance(model[key], bool) else None for key in fetched}
    given = accepted(model["_target_"], offered)
    raise_problems(
        f"model.{name}={model[name]} has no effect: the data and the task need {value}. Leave it out."
        for name, value in given.items()
        if name in model and model[name] != value
    )
    return create({**model, **skipped}, "model", **given)
