"""Creates objects from config nodes. Keys are checked against the signature of the class or function that gets them."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lockstep.config import targets
from lockstep.config.targets import accepted, is_shipped, locate, parameters, takes_one, target_of, type_problem
from lockstep.config.words import nearest, shown
from lockstep.errors import UserError, raise_problems

# --- Creates objects from config nodes. Keys are checked against the signature of the class or function that gets them ---
#
# Only classes of a key's kind may be named (config/targets.py), so a config or a checkpoint cannot run arbitrary code.

SPECIAL = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")  # Hydra's
# Keys of a node that the engine reads itself. They are passed on only if the signature names them.
ENGINE = {
    "task": ("name", "monitor", "mode", "metrics"),
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
        yield f"{key}.{found[1]} is not an argument of {node['_target_']}{nearest(found[1], known)}."


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
    """Whether `data` names a LightningDataModule, which has its own dataloaders."""
    return targets.is_a(str(cfg.data.get("_target_")), targets.LOADERS)


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


def target_problems(node: Mapping[str, Any], key: str, *, imported: bool = True) -> Iterator[str]:
    """Problems of a node's `_target_`: it is missing, may not be named, or does not exist."""
    target = node.get("_target_")
    if target in (None, MISSING):
        yield f"{key}._target_ is missing; it names the class, for example {key}._target_=my_package.my_module.MyClass."
        return
    try:
        (target_of if imported else targets.named)(str(target), key)
    except UserError as e:
        yield from e.problems


def problems(
    node: Mapping[str, Any], key: str, *, given: Mapping[str, Any] | None = None, imported: bool = True
) -> Iterator[str]:
    """Problems of the keys of a node. If `given` is None, missing arguments are not reported, as the engine may add them.

    Without `imported`, only what the sources say is judged, and nothing is imported.
    """
    places = {key: node, **dict(targets.nodes(node, key))}  # it may have no `_target_` itself
    if wrong := [text for place, each in places.items() for text in target_problems(each, place, imported=imported)]:
        yield from wrong
        return
    target: str = node["_target_"]
    named = parameters(target, imported=imported)
    if named is None:
        return
    known = [name for name, parameter in named.items() if takes_one(parameter)]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values())
    for name in (name for name in node if name not in (*SPECIAL, *ENGINE.get(key, ()))):
        if name in known:
            yield from type_problem(target, named[name], f"{key}.{name}", node[name])
        elif not takes_any:
            meant = nearest(name, [*known, *ENGINE.get(key, ())])
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
