"""Creates the network of a config, for the data and the task."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lockstep.config.instantiate import create
from lockstep.config.targets import accepted
from lockstep.errors import raise_problems

WEIGHTS = ("pretrained", "checkpoint_path")  # keys that fetch weights to start from


def network(model: Mapping[str, Any], offered: Mapping[str, Any], *, with_weights: bool = True) -> nn.Module:
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
