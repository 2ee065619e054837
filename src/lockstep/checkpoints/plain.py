"""Which values torch.load accepts with weights_only=True."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

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
