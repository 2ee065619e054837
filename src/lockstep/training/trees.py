"""Changes the samples of a batch or of a network's output: a tensor, or dicts, lists and tuples of tensors."""

# B batch, fillers included

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lockstep.errors import UserError

Tree = Any
Change = Callable[[Any, str], Any]  # of a value, and the name of its place


def by_sample(tree: Tree, size: int, samples: Change, other: Change, name: str) -> Tree:
    """`tree` with `samples` of each value that has a batch of `size`, and `other` of what is no container.

    Such a value is a tensor whose first dimension is B, or a list or tuple of B items, whatever these are. Dicts, dataclasses, and
    other lists and tuples, such as (logits_BK, embedding_BE), are changed by value. A tuple of B tensors that all have B rows holds
    several outputs.
    """

    def changed(value: Any, place: str) -> Any:
        return by_sample(value, size, samples, other, f"{name}{place}")

    if has_rows(tree, size):
        return samples(tree, name)
    if isinstance(tree, list | tuple):
        if len(tree) == size and not (isinstance(tree, tuple) and all(has_rows(value, size) for value in tree)):
            return samples(tree, name)
        values = [changed(value, f"[{place}]") for place, value in enumerate(tree)]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)  # a named tuple
    if isinstance(tree, Mapping):
        new: Any = copy.copy(tree)
        for key, value in tree.items():
            new[key] = changed(value, f"[{key!r}]")
        return new
    if dataclasses.is_dataclass(tree):
        new = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(new, field.name, changed(getattr(tree, field.name), f".{field.name}"))
        return new
    return other(tree, name)


def has_rows(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == size


def first_rows(output: Tree, count: int, size: int) -> Tree:
    """The first `count` samples of a network's output for a batch of `size`.

    Raises:
        UserError: a tensor without B rows, a value that is neither a tensor nor None, or a list that may hold samples or outputs.
    """

    def cut(value: Any, name: str) -> Any:
        # a tensor for each sample, or B outputs, such as levels of features
        if 0 < count < size and isinstance(value, list) and all(has_rows(item, size) for item in value):
            raise UserError(
                f"the network returns {name}, a list of {size} tensors with {size} rows each, for a batch of {size}: it holds a tensor for each "
                f"sample, or {size} outputs. Return a tuple of several outputs, or a dict for each sample."
            )
        return value[:count]

    def refused(value: Any, name: str) -> None:
        if value is not None:
            given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            raise UserError(
                f"the network returns {name} of {given} for a batch of {size}. The first dimension of every tensor must be the sample, {size} here, "
                "and a list must have an item per sample, so fillers can be removed. Return something else, or choose what to return in the "
                "task's `outputs`."
            )

    return by_sample(output, size, cut, refused, "output")


def samples_at(batch: Mapping[str, Any], places: slice | list[int] | Tensor, size: int) -> dict[str, Any]:
    """The samples at `places` of a batch of `size`. Values without an entry per sample stay as they are."""

    def taken(value: Any, _: str) -> Any:
        if isinstance(value, Tensor) or isinstance(places, slice):
            return value[places]
        return type(value)([value[place] for place in (places.tolist() if isinstance(places, Tensor) else places)])

    taken_batch: dict[str, Any] = by_sample(batch, size, taken, lambda value, _: value, "batch")
    return taken_batch


def without_fillers(output: Tree, batch: Mapping[str, Any]) -> tuple[Tree, dict[str, Any]]:
    """A network's output in float32 and its batch, of the samples that count."""
    count, size = batch["count"], len(batch["index"])
    return float32(first_rows(output, count, size)), samples_at(batch, slice(count), size)


def float32(tree: Any) -> Any:
    """Half precision converted to float32, so figures are exact whatever precision the network used."""

    def full(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor

    return apply_to_collection(tree, Tensor, full)
