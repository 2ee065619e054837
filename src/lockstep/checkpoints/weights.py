"""Loading the weights of a checkpoint into a network: the one place where names and shapes are compared."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lockstep.errors import UserError

SHOWN = 5  # names in a message


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
    if found := list(differences(own, saved)):
        raise UserError(
            f"{source} does not fit the network: {'; '.join(found)}. Use the model and data that it was trained with."
        )
    for name, tensor in own.items():
        tensor.copy_(sharded_like(saved[name], tensor))
