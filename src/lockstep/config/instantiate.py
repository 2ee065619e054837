"""Objects from the nodes of a config: what may be made is listed, so that a config or a checkpoint cannot run any code."""

from typing import Any

from hydra.utils import instantiate
from torch import nn

from lockstep.config import project
from lockstep.errors import UserError

# What configs may name, and what those may return; beside it, the packages of the project (config/project.py).
TRUSTED = [
    "lockstep.*",
    "torch.nn.*",
    "torch.optim.*",
    "torchvision.*",
    "timm.*",
    "lightning.pytorch.*",
    "optuna.pruners.*",
]


def create(node: Any, **arguments: Any) -> Any:
    """The object that a node describes."""
    project.make_importable()
    return instantiate(node, _execution_whitelist_=[*TRUSTED, *project.trusted()], _convert_="all", **arguments)


def network(model: dict[str, Any], about: dict[str, Any], *, with_weights: bool = True) -> nn.Module:
    """The network of a `model` node for data with the channels, classes and image size that `about` tells.

    Without weights, those that the node starts from (`pretrained`, `checkpoint_path`) are not fetched: a checkpoint has all.

    Raises:
        UserError: the network cannot be made.
    """
    shape = {"in_channels": about["channels"], "num_classes": len(about["classes"]), "image_size": about["image_size"]}
    fetched = {"pretrained": False, "checkpoint_path": None}
    skipped = {} if with_weights else {key: value for key, value in fetched.items() if key in model}
    try:
        net: nn.Module = create({**model, **skipped}, **shape)
    except UserError:
        raise
    except Exception as e:
        cause = e.__cause__ or e  # Hydra wraps what the class raised
        raise cause if isinstance(cause, UserError) else UserError(f"model: {cause}") from None
    return net
