"""Changes every tensor of a batch or of a network's output: a tensor, or dicts, lists and tuples of tensors."""

# B batch, fillers included

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lockstep.errors import UserError

Tree = Any


def first_rows(output: Tree, count: int, size: int) -> Tree:
    """The first `count` samples of a network's output for a batch of `size`.

    A tensor is cut in its first dimension, which is B; a list or tuple of B items by items, whatever these are. Dicts,
    dataclasses, and other lists and tuples, such as (logits_BK, embedding_BE), are cut by value. A tuple of B tensors that all
    have B rows holds several outputs; a list of B tensors always holds one per sample.

    Raises:
        UserError: a tensor without B rows, or a value that is neither a tensor nor None.
    """

    def cut(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            if has_rows(value, size):
                return value[:count]
            raise UserError(words(f"{name} of shape {tuple(value.shape)}", size))
        if isinstance(value, list | tuple):
            several = len(value) != size or (isinstance(value, tuple) and all(has_rows(x, size) for x in value))
            return rebuilt(value, cut, name) if several else value[:count]
        if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
            return rebuilt(value, cut, name)
        if value is None:
            return None
        raise UserError(words(f"{name} of type {type(value).__name__}", size))

    return cut(output, "output")


def words(given: str, size: int) -> str:
    return (
        f"the network returns {given} for a batch of {size}. The first dimension of every tensor must be the sample, {size} here, and a list "
        f"must have an item per sample, so fillers can be removed. Return something else, or choose what to return in the task's `outputs`."
    )


def has_rows(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == size


def rebuilt(tree: Any, function: Callable[[Any, str], Any], name: str) -> Any:
    """A dict, dataclass, list or tuple with each value changed by `function`, which also gets the value's name."""
    if isinstance(tree, Mapping):
        found = {key: function(value, f"{name}[{key!r}]") for key, value in tree.items()}
        return found if type(tree) is dict else type(tree)(found)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(tree):
        new = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(new, field.name, function(getattr(tree, field.name), f"{name}.{field.name}"))
        return new
    values = [function(value, f"{name}[{place}]") for place, value in enumerate(tree)]
    return type(tree)(values) if type(tree) in (list, tuple) else type(tree)(*values)  # a named tuple


def samples_at(batch: Mapping[str, Any], places: slice | list[int] | Tensor, size: int) -> dict[str, Any]:
    """The samples at `places` of a batch of `size`. Values without an entry per sample stay as they are."""

    def taken(value: Any) -> Any:
        if isinstance(value, Mapping):
            return samples_at(value, places, size)
        if not has_rows(value, size) and not (isinstance(value, list | tuple) and len(value) == size):
            return value
        if isinstance(value, Tensor) or isinstance(places, slice):
            return value[places]
        return type(value)([value[place] for place in (places.tolist() if isinstance(places, Tensor) else places)])

    return {name: taken(value) for name, value in batch.items()}


def first_samples(batch: Mapping[str, Any], count: int) -> dict[str, Any]:
    return samples_at(batch, slice(count), len(batch["index"]))


def float32(tree: Any) -> Any:
    """Half precision converted to float32, so figures are exact whatever precision the network used."""

    def full(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor

    return apply_to_collection(tree, Tensor, full)
