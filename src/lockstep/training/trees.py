"""Changes to every tensor of a batch or of what a network returns: a tensor, or dicts, lists and tuples of them."""

from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def first_rows(tree: Any, count: int) -> Any:
    """The first `count` samples."""
    return apply_to_collection(tree, Tensor, lambda tensor: tensor[:count] if tensor.dim() else tensor)


def float32(tree: Any) -> Any:
    """Half precision as float32, so figures are exact whatever the network computed in."""

    def full(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor

    return apply_to_collection(tree, Tensor, full)
