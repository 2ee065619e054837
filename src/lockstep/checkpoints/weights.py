"""Reading checkpoints, and their weights into a network. Free of Lightning."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lockstep.checkpoints import sharded
from lockstep.checkpoints.finding import Checkpoint, mapped
from lockstep.config.instantiate import network
from lockstep.errors import UserError

# --- Values that torch.load accepts with weights_only=True, as it does those of checkpoints ---

MAPPINGS = (dict, OrderedDict, Counter)
SEQUENCES = (list, tuple, set)
VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def refused(tree: Any, place: str = "") -> Iterator[str]:
    """The places and types of the values that it refuses."""
    if type(tree) in MAPPINGS:
        for key, value in tree.items():
            yield from refused(key, f"{place}/{key}")
            yield from refused(value, f"{place}/{key}")
    elif type(tree) in SEQUENCES:
        for index, value in enumerate(tree):
            yield from refused(value, f"{place}/{index}")
    elif type(tree) not in VALUES and not isinstance(tree, Tensor):
        yield f"{place} ({type(tree).__module__}.{type(tree).__qualname__})"


def plain(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """`tree` with NumPy's values as Python's. Raises UserError before training, not at the first checkpoint, for any others."""
    values: dict[str, Any] = mapped(tree, lambda _, x: x.tolist() if isinstance(x, np.generic | np.ndarray) else x)
    if odd := next(refused(values), None):
        raise UserError(f"{name}{odd} cannot be saved in a checkpoint. Use Python's own values and lists of them.")
    return values


# --- From a checkpoint into a network: the one place where names and shapes are compared ---

SHOWN = 5  # names in a message


def read(path: Path) -> Checkpoint:
    """A checkpoint on the CPU; the shards of a folder are joined. Raises UserError: it is something else, or damaged."""
    return Checkpoint.parse(path, sharded.load(path))


def load_network(path: Path) -> nn.Module | None:
    """The network of a checkpoint with its weights, in evaluation mode; None if a custom module defines its own."""
    checkpoint = read(path)
    if checkpoint.network is None:
        return None
    net = network(checkpoint.config["model"], checkpoint.network, with_weights=False)
    load_into(net.state_dict(), checkpoint.weights, path)
    return net.eval()


def load_module_weights(module: Any, path: Path) -> None:
    """Loads the weights of a custom module, as Lightning does. Raises UserError when the checkpoint does not fit."""
    checkpoint = read(path)
    module.on_load_checkpoint(checkpoint.values)
    load_into(module.state_dict(), checkpoint.state_dict, path)


def sharded_like(value: Any, own: Tensor) -> Any:
    """A value of a checkpoint as this process holds `own`: its shard of the value, or the whole."""
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != own.shape:  # an optimizer's step count
        return value
    # Every process has read the checkpoint and takes its own shard: no communication.
    return distribute_tensor(value.to(own.device).contiguous(), own.device_mesh, own.placements, src_data_rank=None)


def differences(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> Iterator[str]:
    for what, names in (("missing", own.keys() - saved.keys()), ("unexpected", saved.keys() - own.keys())):
        if names:
            yield f"{what}: {', '.join(sorted(names)[:SHOWN])}"
    both = [name for name in own if name in saved and own[name].shape != saved[name].shape]
    yield from (f"{name} is {tuple(saved[name].shape)} instead of {tuple(own[name].shape)}" for name in both[:SHOWN])


@torch.no_grad()
def load_into(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], source: object) -> None:
    """Copies the weights `saved` into the tensors `own` of a network's state_dict.

    Raises:
        UserError: names or shapes differ. The message calls the checkpoint `source`.
    """
    if problems := list(differences(own, saved)):
        raise UserError(
            f"{source} does not fit the network: {'; '.join(problems)}. Use the model and data that it was trained with."
        )
    for name, tensor in own.items():
        tensor.copy_(sharded_like(saved[name], tensor))
