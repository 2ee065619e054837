"""Creates objects from config nodes. Keys are checked against the signature of the class or function that gets them."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from lockstep.config import targets
from lockstep.config.run_config import Component, Loader
from lockstep.config.schema import KEYS
from lockstep.config.targets import accepted, locate, parameters, takes_one, target_of, type_problem, unnamed
from lockstep.config.words import shown
from lockstep.errors import UserError, did_you_mean, raise_problems

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import nn

# Only classes of a key's kind may be named (config/targets.py), so a config or a checkpoint cannot run arbitrary code.

SPECIAL = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")  # Hydra's
# Keys of a node that the engine reads itself. They are passed on only if the signature names them.
ENGINE = {
    "task": ("name", "monitor", "mode", "metrics", "replaces"),
    "model": ("name",),
    "data": ("name",),
    "strategy": ("name",),
    "optim": ("no_decay", "layer_decay", "head_lr"),
}
PARTIAL = ("optim", "schedule")  # the engine adds parameters or the optimizer, and makes the object


def create(component: Component, key: str, **given: Any) -> Any:
    """Creates the object of a component. `given` are arguments from the engine; `key` is the component's place in the config.

    Raises:
        UserError: a key is unknown, missing or has a wrong type, or the target may not be named.
        Exception: whatever the class itself raises.
    """
    plain = {**component.node, **({"_partial_": True} if key in PARTIAL else {})}
    raise_problems(problems(plain, key, given=given))
    if "${" in str(plain):  # Hydra would resolve it, and find nodes that were not checked
        raise UserError(f"{key} holds an interpolation in an escaped form: {shown(plain)}. Write its value.")
    named = parameters(plain["_target_"])
    kept = {k: v for k, v in plain.items() if k not in ENGINE.get(key, ()) or (named is not None and k in named)}
    allowed = [f"{prefix}*" for prefix in targets.trusted()]
    try:
        made = instantiate({**kept, "_partial_": True}, _execution_whitelist_=allowed, _convert_="all")
        # past Hydra, which would create objects of nodes in them: those of the network are from a checkpoint, which may be a stranger's
        if not plain.get("_partial_"):
            return made(**given)
        # Hydra's partial objects cannot be pickled, and Lightning drops hyperparameters that cannot
        return partial(made.func, *made.args, **made.keywords, **given)
    except InstantiationException as e:
        raise (e.__cause__ or UserError(f"{key}: {' '.join(str(e).split())}")) from None
    except ValueError as e:
        if isinstance(e, UserError) or not str(plain["_target_"]).startswith(targets.TRUSTED):
            raise
        joint = "." if str(e).partition("=")[0] in kept else ": "  # a message may begin with the argument
        raise UserError(f"{key}{joint}{e}") from None
    except TypeError as e:
        # The class may have passed a key on, through **kwargs, to a callee that does not take it.
        wrong = re.search(r"unexpected keyword argument '(\w+)'", str(e))
        if wrong and wrong[1] in kept and wrong[1] not in (named or {}):
            meant = did_you_mean(wrong[1], [*(named or {}), *ENGINE.get(key, ())])
            raise UserError(f"{key}.{wrong[1]} is not an argument of {plain['_target_']}{meant}.") from None
        lacking = re.search(r"missing \d+ required .*?'(\w+)'", str(e))  # one that a shipped class passes on
        if lacking and component.is_shipped:
            raise UserError(f"{key}.{lacking[1]} is missing, and {plain['_target_']} needs it.") from None
        raise


def is_a(component: Component, key: str, base: str, *nearer: str) -> bool:
    """Whether a component is a subclass of `base`, which is known by its name. A subclass of one of `nearer` is no such class. The source
    says so; if it does not, the class is imported."""
    homes = targets.lineage(component.target)
    if homes is None:
        target = target_of(component.target, key) if component and not component.is_shipped else None
        homes = [*map(targets.home, getattr(target, "__mro__", ()))]
    return [home for home in homes if home in (base, *nearer)][:1] == [base]


def not_its_own(data: Component) -> list[str]:
    """Arguments that a class does not take."""
    named = parameters(data.target)
    if named is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values()):
        return []
    return [name for name in data.kwargs if name not in (*named, *SPECIAL, *ENGINE["data"])]


def data_set_problems(data: Component) -> Iterator[str]:
    """Problems of a data set: its class, the checks of the class itself, and its keys."""
    if wrong := list(target_problems({"data": data.node})):
        yield from wrong
        return
    yield from getattr(target_of(data.target, "data"), "problems", lambda _: ())(data.kwargs)
    yield from problems(data.node, "data")


def create_data(data: Component, loader: Loader) -> Any:
    """Creates a data set, without its dataloaders; its class gets the keys of `loader` that it names."""
    raise_problems(data_set_problems(data))
    return create(data, "data", **accepted(data.target, vars(loader)))


def create_custom_module(task: Component) -> "pl.LightningModule":
    """Creates the LightningModule of a task. It runs unchanged, with its own steps, optimizers and metrics."""
    partials = {name: node for name, node in task.kwargs.items() if isinstance(node, Mapping) and node.get("_partial_")}
    made = {name: create(Component.of(node), f"task.{name}") for name, node in partials.items()}
    return create(task.without(*made), "task", **made)


def target_problems(nodes: Mapping[str, Any]) -> Iterator[str]:
    """Problems of the `_target_` of nodes, which are given by their keys: it is missing, may not be named, or does not exist."""
    for key, node in nodes.items():
        yield from (wrong := list(unnamed(node, key)))
        try:
            if not wrong:
                target_of(node["_target_"], key)
        except UserError as e:
            yield from e.problems


def not_taken(target: str, key: str, names: Iterable[str], known: Sequence[str]) -> Iterator[str]:
    """Those of `names` that are not among the arguments that a target is `known` to take."""
    for name in (name for name in names if name not in known):
        meant = did_you_mean(name, [*known, *ENGINE.get(key, ())])
        yield f"{key}.{name} is not an argument of {target}{meant}; it takes {', '.join(known) or 'none'}."


def problems(node: Mapping[str, Any], key: str, *, given: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Problems of the keys of a node. If `given` is None, missing arguments are not reported, as the engine may add them."""
    # The node may have no `_target_` itself.
    if wrong := list(target_problems({key: node, **dict(targets.nodes(node, key))})):
        yield from wrong
        return
    target: str = node["_target_"]
    named = parameters(target)
    if named is None:
        return
    engine = ENGINE.get(key, ())
    known = [name for name, parameter in named.items() if takes_one(parameter)]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values())
    for name in (name for name in node if name not in (*SPECIAL, *engine)):
        if name in known:
            # config/schema.py has the better message
            if f"{key}.{name}" not in KEYS or not Component.of(node).is_shipped:
                yield from type_problem(named[name], f"{key}.{name}", node[name])
        elif not takes_any:
            yield from not_taken(target, key, [name], known)
    if given is not None and not node.get("_partial_"):
        for name in known:
            if named[name].default is inspect.Parameter.empty and name not in node and name not in given:
                offered = f" The data and the task offer {', '.join(given)}." if given else ""
                yield f"{key}.{name} is missing: {target} needs it. Set +{key}.{name}=<value>.{offered}"


# --- The operations of the `augment` group. Lockstep's own are free of torch, so a check makes them to check their arguments ---


def operations(components: Mapping[str, Component], image_size: int | None) -> dict[str, Any]:
    """The operations of `augment` by name, in its order. The data offers them `image_size`.

    Raises:
        UserError: all that is wrong with their arguments.
    """
    made: dict[str, Any] = {}
    wrong: list[str] = []
    for name, each in components.items():
        offered = accepted(each.target, {"image_size": image_size})
        try:
            made[name] = create(each, f"augment.{name}", **{k: v for k, v in offered.items() if k not in each})
        except UserError as e:
            wrong += e.problems
    raise_problems(wrong)
    return made


# --- The network, for the data and the task ---


def pretraining(model: Component, data: Component) -> dict[str, Any]:
    """What `model` stands for as a value in `data`: what the network was pretrained with, else what the data has."""
    network, kind = locate(model.target) if model else None, locate(data.target)
    raise_problems(
        f"{component.target}: `normalisation` is now `{now}`, which returns a dict with mean and std. Rename it."
        for component, found, now in ((model, network, "preprocessing"), (data, kind, "defaults"))
        if hasattr(found, "normalisation")
    )
    values, own = getattr(network, "preprocessing", lambda _: None)(model.name) or {}, kind.defaults(data.kwargs)
    if len(values.get("mean", own["mean"])) != len(own["mean"]):  # of colour images, used on grey ones
        values = {**values, "mean": own["mean"], "std": own["std"]}
    if data.get("resize") not in ("model", values.get("resize")):  # what is padded or squashed is not cropped as well
        values = {**values, "crop_pct": own["crop_pct"]}
    return {**own, **values}


WEIGHTS = ("pretrained", "checkpoint_path")  # keys that fetch weights to start from


def network(model: Component, offered: Mapping[str, Any], *, with_weights: bool = True) -> "nn.Module":
    """The network of `model`. It gets the `offered` arguments that its signature names.

    With with_weights=False, pretrained weights are not loaded, because a checkpoint provides them.

    Raises:
        UserError: a key is unknown, missing, of a wrong type, or contradicts what is offered.
    """
    fetched = () if with_weights else [key for key in WEIGHTS if key in model]
    skipped = {key: False if isinstance(model.get(key), bool) else None for key in fetched}
    given = accepted(model.target, offered)
    raise_problems(
        f"model.{name}={model.get(name)} has no effect: the data and the task need {value}. Remove it."
        for name, value in given.items()
        if name in model and model.get(name) != value
    )
    return create(model.but(**skipped), "model", **given)
