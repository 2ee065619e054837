"""What a task takes as targets, and the checks of what a class of the user's returns or overrides."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.training.task import Task

Plain = str | int | float
RESERVED = ("index", "path", "row", "error")  # columns of a table of predictions that say what a row is about
AT_ONCE = 2**22  # numbers that are judged together


@dataclass(frozen=True)
class Targets:
    """What a task takes as targets. Whole numbers are from `least` on and stand for names, unless `most` is given."""

    what: str  # in words, of one sample
    dims: int | None  # of one sample's; None: any
    whole: bool = True
    least: float = 0
    most: float | None = None
    ignored: int | None = None  # a number that does not count
    hint: str = ""

    def wrong(self, target_N: NDArray[Any], names: int) -> tuple[int, str] | None:
        """The place of the first sample whose target is something else, and what it is."""
        most = names - 1 if self.most is None else self.most
        limits = (f" from 0 to {most}" if self.whole else "") + ("" if self.ignored is None else f", or {self.ignored}")
        expected = f"expected {self.what}{limits}. Correct it, or remove the sample{self.hint}."
        if self.dims not in (None, target_N.ndim - 1) or target_N.dtype.kind not in "biuf":
            return 0, f"{target_N.dtype} of shape {target_N.shape[1:]}; {expected}"
        rows = max(1, AT_ONCE * len(target_N) // max(1, target_N.size))  # masks may fill the memory
        for first in range(0, len(target_N), rows):
            block = target_N[first : first + rows]
            odd = ~(np.isfinite(block) & (block >= self.least) & (block <= most) | (block == self.ignored))
            if self.whole and block.dtype.kind == "f":
                odd |= block != np.trunc(block)
            if odd.any():
                return first + int(np.argwhere(odd)[0, 0]), f"{block[odd][0]}; {expected}"
        return None


def validated_columns(columns: Mapping[str, Any], *, targets: bool = False) -> dict[str, Any]:
    """Raises UserError if predictions have a column that Lockstep writes itself; with `targets`, they may be among them."""
    taken = [name for name in columns if name in RESERVED or name.startswith("target/")]
    if taken := [name for name in taken if not targets or name.partition("/")[0] != "target"]:
        raise UserError(
            f"the predictions have a column {taken[0]}, which Lockstep's tables of predictions have themselves. Reserved are "
            f"{', '.join(RESERVED)} and target/... Rename the column."
        )
    return dict(columns)


def is_small(column: Any, count: int) -> bool:
    """Whether a column has a text, a number, or up to eight numbers for each of `count` samples."""
    if isinstance(column, Tensor):
        return column.dim() > 0 and len(column) == count and column[:1].numel() <= 8
    return isinstance(column, list | tuple) and len(column) == count and all(isinstance(x, Plain) for x in column)


def validate_outputs(output: Tensor, *shape: int) -> None:
    """Raises UserError if a network's output has a different shape."""
    if output.shape != shape:
        raise UserError(
            f"the network gives {tuple(output.shape)}, but the task and the data need {shape}. Choose a different model, or give "
            "it the number of outputs that the data needs."
        )


def loss_factors(task: "Task", name: str, factors: Sequence[float] | None) -> Tensor | None:
    """The factors of a loss. Raises UserError if they are not one for each class or label."""
    if factors is None:
        return None
    if len(factors) != len(task.value_names):
        raise UserError(
            f"task.{name} has {len(factors)} numbers; the data has {len(task.value_names)} {task.names}. Give one for each."
        )
    return torch.tensor(factors, dtype=torch.float32)


def without_super(kind: type["Task"], base: type["Task"]) -> str:
    """The first method of LightningModule that a task's class has in place of Task's own, without calling that; empty if there is none."""
    shared = {name for name in vars(base) if hasattr(pl.LightningModule, name) and not name.startswith("__")}
    for each in kind.__mro__[: kind.__mro__.index(base)]:
        for name in sorted(shared & vars(each).keys()):
            code = getattr(inspect.unwrap(vars(each)[name]), "__code__", None)
            if code and "super" not in code.co_names:
                return name
    return ""
