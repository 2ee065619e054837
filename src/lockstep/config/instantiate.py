"""Creates objects from config nodes. Keys are checked against the signature of the class or function they are for."""

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from lockstep.config import targets
from lockstep.config.formatting import to_text
from lockstep.config.run_config import Component, Loader
from lockstep.config.schema import KEYS
from lockstep.errors import UserError, did_you_mean, raise_problems

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import nn

# A key accepts only classes of its kind (config/targets.py), so a config or a checkpoint cannot run arbitrary code.

SPECIAL = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")  # Hydra's
# Keys of a node that the engine reads itself. They are passed on only if the signature has a parameter of that name.
ENGINE = {
    "task": ("name", "monitor", "mode", "metrics", "named_batches", "replaces"),
    "model": ("name",),
    "data": ("name",),
    "strategy": ("name",),
    "optim": ("no_decay", "layer_decay", "head_lr"),
}
PARTIAL = ("optim", "schedule")  # the engine creates the object, with the parameters or the optimizer


def create_object(component: Component, key: str, **kwargs: Any) -> Any:
    """Creates the object of a component at `key` of the config. `kwargs` are arguments from the engine.

    Raises:
        UserError: a key is unknown, missing or has a wrong type, or a config may not name the target.
        Exception: whatever the class itself raises.
    """
    node = {**component.node, **({"_partial_": True} if key in PARTIAL else {})}
    raise_problems(problems(node, key, given=kwargs))
    if "${" in str(node):  # Hydra would resolve it to nodes that were not checked
        raise UserError(f"{key} contains an escaped interpolation: {to_text(node)}. Write its value instead.")
    named = targets.parameters(node["_target_"])
    arguments = {k: v for k, v in node.items() if k not in ENGINE.get(key, ()) or (named is not None and k in named)}
    allowed = [f"{prefix}*" for prefix in targets.trusted()]
    try:
        factory = instantiate({**arguments, "_partial_": True}, _execution_whitelist_=allowed, _convert_="all")
        # Without Hydra, which would instantiate nodes in kwargs: a network's come from a possibly untrusted checkpoint.
        # It would also reject a module that a user's function gets from a library. Its partial objects cannot be pickled,
        # and Lightning drops hyperparameters that cannot be pickled.
        create = partial(factory.func, *factory.args, **{**factory.keywords, **kwargs})
        return create if node.get("_partial_") else create()
    except InstantiationException as e:
        raise (e.__cause__ or UserError(f"{key}: {' '.join(str(e).split())}")) from None
    except ValueError as e:
        names_a_key = re.match(r"(data|loader|model|optim|schedule|task)\.\w+=", str(e))
        if isinstance(e, UserError) or not (names_a_key or str(node["_target_"]).startswith(targets.TRUSTED)):
            raise  # an error of the user's class, with its traceback
        separator = "." if str(e).partition("=")[0] in arguments else ": "  # a message may begin with the argument
        raise UserError(str(e) if names_a_key else f"{key}{separator}{e}") from None
    except TypeError as e:
        # The class may have passed a key on, through **kwargs, to a callee without such a parameter; a shipped one may need a key there.
        name = re.search(r"(?:unexpected keyword argument|missing \d+ required .*?) '(\w+)'", str(e))
        if name and (component.is_shipped or name[1] in arguments.keys() - (named or {}).keys()):
            raise UserError(f"{key}.{name[1]}: {e}.") from None
        raise


def create_offered(component: Component, key: str, offered: Mapping[str, Any]) -> Any:
    """Creates the object of a component, with those of the `offered` arguments that its signature has and its config does not set."""
    given = targets.matching_kwargs(component.target, offered)
    return create_object(component, key, **{k: v for k, v in given.items() if k not in component})


def has_base(component: Component, key: str, base: str) -> bool:
    """Whether `base`, a dotted name, is a base of a component's class. Imports the class, unless it is shipped: none of those has one."""
    if not component or component.is_shipped:
        return False
    target = targets.target_of(component.target, key)
    return base in map(targets.qualified_name, getattr(target, "__mro__", ()))


def data_set_problems(data: Component) -> Iterator[str]:
    """Problems with a data set: its class, its keys, and the class's own checks."""
    yield from problems(data.node, "data")
    if not list(target_problems({"_target_": data.target}, "data")):
        yield from getattr(targets.target_of(data.target, "data"), "problems", lambda _: ())(data.kwargs)


def create_data(data: Component, loader: Loader) -> Any:
    """Creates a data set without its dataloaders. Its class gets the keys of `loader` that are among its parameters."""
    raise_problems(data_set_problems(data))
    return create_offered(data, "data", vars(loader))


# Arguments of a LightningModule's constructor that come from elsewhere if it requires them, and the group of each.
GIVEN = {"net": "model", "optimizer": "optim", "scheduler": "schedule", "metadata": "data"}


def required_arguments(task: Component) -> set[str]:
    """Those of GIVEN that the class of a task, or a base class that it passes them on to, requires and its config does not set."""
    named = targets.parameters(task.target) or {}
    required = {name for name, p in named.items() if p.default in (p.empty, targets.INHERITED)}
    return (required & GIVEN.keys()) - task.kwargs.keys()


def network_arguments(task: Component, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the class of a task says that a network needs to know of the data; by default, the number of classes."""
    default = {"num_classes": len(metadata["classes"])} if metadata.get("classes") else {}
    cls: Any = targets.target_of(task.target, "task")
    getattr(cls, "check_metadata", lambda _: None)(metadata)
    of_class = getattr(cls, "network_arguments", lambda *_, **__: default)
    return of_class(metadata, **task.without(*ENGINE["task"]).kwargs)  # type: ignore[no-any-return]


def create_module(task: Component, **given: Any) -> "pl.LightningModule":
    """The LightningModule of a task. Arguments with `_partial_` are functions."""
    partials = {name: node for name, node in task.kwargs.items() if isinstance(node, Mapping) and node.get("_partial_")}
    objects = {name: create_object(Component.of(node), f"task.{name}") for name, node in partials.items()}
    return create_object(task.without(*objects, *given), "task", **objects, **given)


def target_problems(node: Mapping[str, Any], key: str) -> Iterator[str]:
    """Problems with the `_target_` of a node and of its nested nodes: it is missing, may not be named by a config, or does not exist."""
    for each, part in {key: node, **dict(targets.nodes(node, key))}.items():
        try:
            targets.target_of(part.get("_target_"), each)
        except UserError as e:
            yield from e.problems


def problems(node: Mapping[str, Any], key: str, *, given: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Problems with the keys of a node. If `given` is None, ignores missing arguments: the engine may add them."""
    if errors := list(target_problems(node, key)):
        yield from errors
        return
    target: str = node["_target_"]
    named = targets.parameters(target)
    if named is None:
        return
    engine = ENGINE.get(key, ())
    names = [name for name, parameter in named.items() if targets.accepts_keyword(parameter)]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values())
    for name in (name for name in node if name not in (*SPECIAL, *engine)):
        if name in names:
            # config/schema.py reports this with a clearer message
            if f"{key}.{name}" not in KEYS or not Component.of(node).is_shipped:
                yield from targets.type_problem(named[name], f"{key}.{name}", node[name])
        elif not takes_any:
            accepted = [*names, *engine]
            yield f"{key}.{name} is not an argument of {target}{did_you_mean(name, accepted)}; it accepts {', '.join(accepted) or 'none'}."
    if given is not None and not node.get("_partial_"):
        for name in names:
            if named[name].default is inspect.Parameter.empty and name not in node and name not in given:
                hint = f" The data and the task provide {', '.join(given)}." if given else ""
                yield f"{key}.{name} is missing: {target} needs it. Set +{key}.{name}=<value>.{hint}"


# --- Operations of `augment`. Those of Lockstep need no torch, so a check creates them to check their arguments ---


def operations(components: Mapping[str, Component], image_size: int | None) -> dict[str, Any]:
    """The operations of `augment` by name, in config order. Those with a parameter `image_size` get that of the data.

    Raises:
        UserError: all errors in their arguments.
    """
    built: dict[str, Any] = {}
    errors: list[str] = []
    for name, component in components.items():
        try:
            built[name] = create_offered(component, f"augment.{name}", {"image_size": image_size})
        except UserError as e:
            errors += e.problems
    raise_problems(errors)
    return built


# --- The network, for the data and the task ---


def pretraining(model: Component, data: Component) -> dict[str, Any]:
    """The values that `model` stands for in `data`: the network's pretraining settings, or else the data's defaults."""
    net, data_set = targets.locate(model.target) if model else None, targets.locate(data.target)
    values, defaults = getattr(net, "preprocessing", lambda _: None)(model.name) or {}, data_set.defaults(data.kwargs)
    if len(values.get("mean", defaults["mean"])) != len(defaults["mean"]):  # pretrained on colour, used on grey
        values = {**values, "mean": defaults["mean"], "std": defaults["std"]}
    if data.get("resize") not in ("model", values.get("resize")):  # padded or squashed images are not cropped as well
        values = {**values, "crop_pct": defaults["crop_pct"]}
    return {**defaults, **values}


WEIGHTS = ("pretrained", "checkpoint_path")  # keys that load initial weights


def network(model: Component, context: Mapping[str, Any], *, with_weights: bool = True) -> "nn.Module":
    """The network of `model`. It gets the values of `context` that its signature has parameters for.

    With with_weights=False, pretrained weights are not loaded, because a checkpoint provides them.

    Raises:
        UserError: a key is unknown, missing, of a wrong type, or contradicts the context.
    """
    keys = () if with_weights else [key for key in WEIGHTS if key in model]
    without_weights = {key: False if isinstance(model.get(key), bool) else None for key in keys}
    kwargs = targets.matching_kwargs(model.target, context)
    raise_problems(
        f"model.{name}={model.get(name)} has no effect: the data and the task need {value}. Remove it."
        for name, value in kwargs.items()
        if name in model and model.get(name) != value
    )
    return create_object(model.replace(**without_weights), "model", **kwargs)
