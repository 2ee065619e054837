"""Columns of predictions as the rows of a table: plain values by name."""

# B batch · K class, label, ... · H W pixel

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lockstep.errors import UserError

WIDE = "probabilities"  # a column of a number for each class or label, written on request


def digits(value: Any) -> Any:
    """A float with the digits that float32 has."""
    if isinstance(value, list):
        return [digits(each) for each in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def is_mask(value: Any) -> bool:
    """Whether it is an image of whole numbers for each sample."""
    return isinstance(value, Tensor) and value.dim() == 3 and not value.is_floating_point()


def cells(name: str, value: Sequence[Any] | Tensor, names: Sequence[str], *, wide: bool) -> dict[str, list[Any]]:
    """The columns that one column of a task's predictions becomes."""
    if not isinstance(value, Tensor):
        return {name: list(value)}
    if value.dim() > 2:
        raise UserError(
            f"the predictions have a column `{name}` of shape {tuple(value.shape)}; a row holds numbers, texts, lists of them, or an "
            "image of whole numbers (HW). Return something smaller."
        )
    if value.dim() == 2 and name == WIDE and names:
        columns = value.unbind(1) if wide else ()
        return {f"probability/{label}": digits(column.tolist()) for label, column in zip(names, columns, strict=False)}
    return {name: digits(value.tolist())}


def rows(columns: Mapping[str, Sequence[Any] | Tensor], names: Sequence[str], *, wide: bool) -> list[dict[str, Any]]:
    """A dict for each sample. Raises UserError if the columns differ in length."""
    found: dict[str, list[Any]] = {}
    for name, value in columns.items():
        found |= cells(name, value, names, wide=wide)
    lengths = {name: len(column) for name, column in found.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"the columns of the predictions differ in length: {lengths}. Each needs a value per sample.")
    return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]


def of_module(output: Any) -> dict[str, Any]:
    """The columns of what a user's `predict_step` returned."""
    if isinstance(output, Mapping):
        return dict(output)
    if isinstance(output, Tensor | list | tuple):
        return {"output": output}
    raise UserError(
        f"predict_step returned {type(output).__name__}. Return a tensor or a list with a value per sample, or a dict of them by column."
    )
