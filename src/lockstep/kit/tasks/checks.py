"""What the tasks check: targets, outputs, factors of a loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep import UserError

AT_ONCE = 2**22  # most elements that are checked at once


@dataclass(frozen=True)
class Targets:
    """The targets that a task expects. Whole numbers start at `minimum` and index the names, unless `maximum` is set."""

    what: str  # description of one sample's target, for messages
    dims: int | None  # dimensions of one sample's target; None: any
    integer: bool = True
    minimum: float = 0
    maximum: float | None = None
    ignored: int | None = None  # a number that is excluded from loss and metrics
    hint: str = ""

    def wrong(self, target_N: NDArray[Any], names: int) -> tuple[int, str] | None:
        """The index of the first sample with an invalid target, and a description of that target."""
        high = names - 1 if self.maximum is None else self.maximum
        ignored = "" if self.ignored is None else f", or {self.ignored}"
        limits = f"{f' from 0 to {high}' if self.integer else ''}{ignored}"
        expected = f"expected {self.what}{limits}. Correct it, or remove the sample{self.hint}; for different targets, set a different task."
        if self.dims not in (None, target_N.ndim - 1) or target_N.dtype.kind not in "biuf":
            return 0, f"{target_N.dtype} of shape {target_N.shape[1:]}; {expected}"
        rows = max(1, AT_ONCE * len(target_N) // max(1, target_N.size))  # masks may be too large for memory
        for first in range(0, len(target_N), rows):
            block = target_N[first : first + rows]
            is_wrong = ~(np.isfinite(block) & (block >= self.minimum) & (block <= high) | (block == self.ignored))
            if self.integer and block.dtype.kind == "f":
                is_wrong |= block != np.trunc(block)
            if is_wrong.any():
                return first + int(np.argwhere(is_wrong)[0, 0]), f"{block[is_wrong][0]}; {expected}"
        return None


def validate_outputs(output: Tensor, *shape: int) -> None:
    """Raises UserError if a network's output has a different shape."""
    if output.shape != shape:
        raise UserError(
            f"the network returns shape {tuple(output.shape)}, but the task and the data need {shape}. Choose a different model, or set its number of outputs to what the data needs."
        )


def loss_factors(task: Any, name: str, factors: Sequence[float] | None) -> Tensor | None:
    """The factors of a loss. Raises UserError if there is not one for each class or label."""
    if factors is not None and len(factors) != len(task.value_names):
        raise UserError(
            f"task.{name} has {len(factors)} numbers; the data has {len(task.value_names)} {task.names}. Set one number for each."
        )
    return None if factors is None else torch.tensor(factors, dtype=torch.float32)
