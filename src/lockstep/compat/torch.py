"""Private names of torch, each with the reason, and when it can go."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules import _functions

# --- Whether torch is computing gradients ---
#
# Activation checkpointing runs a forward again then. torch 2.13 has only a private name for it. Remove this when `torch.autograd.graph`
# has a public one: tests/compat/test_torch.py::test_backward_and_grad_are_seen_and_torch_has_no_public_name_for_it_yet fails then.


def in_backward() -> bool:
    """Of this thread: also within `torch.autograd.grad`, and on the threads that compute the gradients of a GPU."""
    return bool(torch._C._current_graph_task_id() != -1)


# --- Hooks of parameters ---
#
# `copy.deepcopy` leaves them out (torch 2.13). Remove this when it copies them:
# tests/compat/test_torch.py::test_a_copied_parameter_has_no_hooks fails then.


def copy_hooks(net: nn.Module, copied: nn.Module) -> nn.Module:
    """Gives `copied`, and returns it, the hooks of the parameters of `net`."""
    for parameter, other in zip(net.parameters(), copied.parameters(), strict=True):
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            setattr(other, hooks, getattr(parameter, hooks))
    return copied


# --- The first call of a compiled module ---
#
# `Module.compile` has an effect where the module is called, and none where its methods are (torch 2.13). Hooks would be compiled as well.
# Remove this when torch tells which modules it has compiled:
# tests/compat/test_torch.py::test_only_a_private_name_tells_whether_a_compiled_module_is_called fails then.


def tell_first_call(module: nn.Module, tell: Callable[[], object]) -> None:
    compiled: Any = module._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        module._compiled_call_impl = compiled
        tell()
        return compiled(*args, **kwargs)

    module._compiled_call_impl = call


# --- torch.nn.SyncBatchNorm without waiting for the GPU ---
#
# torch 2.13 drops the statistics of processes that have no sample by three boolean masks in each layer, and the CPU waits for the size of
# each result (pytorch#78549): 165 times in a forward pass of resnet50d. In Lockstep every process has samples. The only switch: torch
# leaves the masks out while it captures a CUDA graph. Remove this when torch has another way:
# tests/compat/test_torch.py::test_torch_asks_the_gpu_for_the_size_of_a_mask fails then.


@contextmanager
def masks_restored() -> Iterator[None]:
    """Undoes `without_masks` afterwards, in a process that is not a run's own."""
    original = _functions.SyncBatchNorm.forward
    try:
        yield
    finally:
        _functions.SyncBatchNorm.forward = staticmethod(original)  # type: ignore[method-assign]


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


# --- `p.data = value` on a sharded parameter ---
#
# torch 2.13 accepts it without effect on a DTensor, whose values are in another tensor. Averages of momentum encoders are written so. Remove
# this when it has the effect, or raises: tests/compat/test_torch.py::test_data_assigned_to_a_sharded_tensor_is_lost fails then.


def assignable_data() -> None:
    """For all DTensors of this process."""
    if "data" not in vars(DTensor):
        get = torch.Tensor.data.__get__  # type: ignore[attr-defined]
        DTensor.data = property(get, write_data)  # type: ignore[assignment]


@torch.no_grad()
def write_data(tensor: DTensor, value: Tensor) -> None:
    if not isinstance(value, DTensor):
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.to_local().copy_(value.to_local())
