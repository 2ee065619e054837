"""Whether torch is computing gradients, in which activation checkpointing runs a forward again.

torch 2.13 has only a private name for it. Remove this file when `torch.autograd.graph` has a public one:
tests/compat/test_recomputation.py fails then.
"""

import torch


def in_backward() -> bool:
    """Of this thread: also within `torch.autograd.grad`, and on the threads that compute the gradients of a GPU."""
    return bool(torch._C._current_graph_task_id() != -1)
