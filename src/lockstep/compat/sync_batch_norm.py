"""torch.nn.SyncBatchNorm without waiting for the GPU.

torch 2.13 drops the statistics of processes that have no sample by three boolean masks in each layer, and the CPU waits for the size of
each result (pytorch#78549): 165 times in a forward pass of resnet50d. In Lockstep every process has samples. The only switch: torch
leaves the masks out while it captures a CUDA graph. Remove this file when torch has another way: tests/compat/test_sync_batch_norm.py
fails then.
"""

from typing import Any
from unittest.mock import patch

import torch
from torch.nn.modules import _functions


def without_masks() -> None:
    """For all layers of this process."""
    function = _functions.SyncBatchNorm
    original = function.forward
    if hasattr(original, "without_masks"):
        return

    def forward(*args: Any) -> Any:
        with patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            return original(*args)

    forward.without_masks = True  # type: ignore[attr-defined]
    function.forward = staticmethod(forward)  # type: ignore[method-assign]
