"""Values that torch.load accepts with weights_only=True, as it does those of checkpoints."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoints.trees import mapped
from lockstep.errors import UserError

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
    found: dict[str, Any] = mapped(tree, lambda _, x: x.tolist() if isinstance(x, np.generic | np.ndarray) else x)
    if odd := next(refused(found), None):
        raise UserError(f"{name}{odd} cannot be saved in a checkpoint. Use Python's own values and lists of them.")
    return found
