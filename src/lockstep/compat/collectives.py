"""Counts the collectives of torch.distributed that run inside of a `with` block.

torch 2.13 shows every operation to a TorchDispatchMode, whose module has a private name; its public user, CommDebugMode, hooks every
module of the process as well. Remove this file when `torch.utils` exports TorchDispatchMode: tests/compat/test_collectives.py fails then.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CollectiveCounter(TorchDispatchMode):
    """Can be entered several times; `count` adds up. Collectives of DTensors are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += getattr(func, "namespace", "") in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))
