"""Changes every tensor of a batch or of a network's output: a tensor, or dicts, lists and tuples of tensors."""

from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def first_rows(tree: Any, count: int) -> Any:
    """The first `count` samples."""
    return apply_to_collection(tree, Tensor, lambda tensor: tensor[:count] if tensor.dim() else tensor)


def float32(tree: Any) -> Any:
    """Half precision converted to float32, so figures are exact whatever precision the network used."""

    def full(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor

    return apply_to_collection(tree, Tensor, full)
