"""Private names of torch, each with the reason and when to remove it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules import _functions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# --- Whether torch is computing gradients ---
#
# Activation checkpointing reruns a forward during a backward. torch 2.13 has only a private name to detect this. Remove
# it when `torch.autograd.graph` has a public one:
# tests/compat/test_torch.py::test_backward_and_grad_are_seen_and_torch_has_no_public_name_for_it_yet fails then.


def in_backward() -> bool:
    """Whether this thread does, also within `torch.autograd.grad` and on threads that compute gradients of a GPU."""
    return bool(torch._C._current_graph_task_id() != -1)


# --- What a data set would be in one process ---
#
# A data set asks torch for the number of processes, and torch (2.13) has no way to answer for a moment that it is one.
# Remove this when it has: tests/compat/test_torch.py::test_torch_is_not_told_that_a_process_is_alone fails then.


def in_one_process(look: Callable[[], Any]) -> Any:
    """The result of `look` if this process were the only one."""
    answers: dict[str, Any] = {
        "is_initialized": lambda: False,
        "get_world_size": lambda *_: 1,
        "get_rank": lambda *_: 0,
    }
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with patch.multiple(torch.distributed, **answers), patch.dict(os.environ, alone):
        return look()


# --- The first call of a compiled module ---
#
# `Module.compile` affects calls of the module, but not calls of its methods (torch 2.13). A hook would be compiled too,
# so it cannot detect them. Remove this when torch reports which modules it has compiled:
# tests/compat/test_torch.py::test_only_a_private_name_tells_whether_a_compiled_module_is_called fails then.


def tell_first_call(module: nn.Module, tell: Callable[[], object]) -> None:
    compiled: Any = module._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        module._compiled_call_impl = compiled
        tell()
        return compiled(*args, **kwargs)

    module._compiled_call_impl = call


def is_compiled(module: nn.Module) -> bool:
    return any(each._compiled_call_impl for each in module.modules())


# --- Counting operations ---
#
# torch.utils.flop_counter.FlopCounterMode (torch 2.13) lacks the attention of CPUs, and adds hooks to all modules. Remove this when it counts
# that: tests/compat/test_torch.py::test_torch_does_not_count_the_attention_of_cpus fails then.

aten = torch.ops.aten
ATTENTION = "_scaled_dot_product_flash_attention"
FORMULAS: dict[Any, Callable[..., int]] = flop_registry | {
    getattr(aten, f"{ATTENTION}_for_cpu{suffix}"): flop_registry[getattr(aten, ATTENTION + suffix)]
    for suffix in ("", "_backward")
}


class Operations(TorchDispatchMode):
    """Counts floating-point operations, as torch's FlopCounterMode, but without its hooks of all modules."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if formula := FORMULAS.get(func.overloadpacket):
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


# --- torch.nn.SyncBatchNorm without waiting for the GPU ---
#
# torch 2.13 drops the statistics of processes without samples by three boolean masks in each layer, and the CPU waits
# for the size of each result (pytorch#78549): 165 times in a forward pass of resnet50d. In Lockstep every process has
# samples. torch leaves the masks out only while it captures a CUDA graph, so this code pretends that it does. Remove
# this when torch has a switch: tests/compat/test_torch.py::test_torch_asks_the_gpu_for_the_size_of_a_mask fails then.


def without_masks() -> None:
    """Applies to all layers of this process."""
    function = _functions.SyncBatchNorm
    original = function.forward
    if hasattr(original, "without_masks"):
        return

    def forward(*args: Any) -> Any:
        with patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            return original(*args)

    forward.without_masks = True  # type: ignore[attr-defined]
    function.forward = staticmethod(forward)  # type: ignore[method-assign]


# --- Values of a sharded tensor ---
#
# In torch 2.13, `p.data = value` on a DTensor has no effect, because its values are in a different tensor. Momentum
# encoders write their averages this way. And `float(p.norm())` is that of this process's shard, not of the whole
# tensor. Remove this when both are right, or raise:
# tests/compat/test_torch.py::test_values_of_a_sharded_tensor_are_those_of_a_shard fails then.


def whole_values() -> None:
    """Applies to all DTensors of this process."""
    if "data" not in vars(DTensor):
        get = torch.Tensor.data.__get__  # type: ignore[attr-defined]
        DTensor.data = property(get, write_data)  # type: ignore[assignment]
        for name in ("item", "__float__", "__int__", "__bool__", "tolist", "numpy"):
            setattr(DTensor, name, partialmethod(whole_value, name))


@torch.no_grad()
def write_data(tensor: DTensor, value: Tensor) -> None:
    if not isinstance(value, DTensor):
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.to_local().copy_(value.to_local())


def whole_value(tensor: DTensor, name: str, *args: Any, **kwargs: Any) -> Any:
    """Every process must call it."""
    with torch.no_grad():
        return getattr(tensor.full_tensor(), name)(*args, **kwargs)


# --- Random numbers of a sharded tensor ---
#
# `torch.randn_like(p)` of a DTensor draws each shard by itself (torch 2.13): with the same seed on all ranks, as in an
# update, the shards on a CPU get the same numbers, and on a GPU others than the whole tensor. Remove this when they are
# the shards of what one process draws: tests/compat/test_torch.py::test_shards_are_drawn_by_themselves fails then.


def whole_draws() -> None:
    """Applies to all DTensors of this process: each draws the whole tensor and keeps its shard."""
    dispatcher: Any = DTensor._op_dispatcher
    for op in dispatcher._random_ops:
        if op._schema.arguments[0].name == "self":  # without torch.rand and the like, and without dropout
            dispatcher._custom_op_handlers[op] = whole_draw


def whole_draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor: DTensor = args[0]
    by_values = op is torch.ops.aten.bernoulli.default  # its probabilities are the tensor's values
    whole = tensor.full_tensor() if by_values else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    drawn = op(whole, *args[1:], **kwargs)
    sharded = distribute_tensor(drawn, tensor.device_mesh, tensor.placements, src_data_rank=None)
    if not op._schema.is_mutable:
        return sharded
    tensor.to_local().copy_(sharded.to_local())
    return tensor


# --- Whether code asks for the seed of torch's generator ---
#
# Data sets use `torch.initial_seed()` as a seed of their own. It differs between workers, and asking leaves no trace in the
# generator (torch 2.13). Remove this when it does:
# tests/compat/test_torch.py::test_only_a_replaced_function_tells_that_the_seed_was_asked_for fails then.


@contextmanager
def tell_initial_seed(tell: Callable[[], object]) -> Iterator[None]:
    original = torch.initial_seed

    def initial_seed() -> int:
        tell()
        return original()

    torch.initial_seed = initial_seed
    try:
        yield
    finally:
        torch.initial_seed = original


# --- Gathering on a GPU what was just written ---
#
# FSDP2's streams (torch 2.13) wait for the current stream when the forward of the root begins, but not for what a step
# writes to shards later. Remove this when FSDPModule has a public name for it:
# tests/compat/test_torch.py::test_fsdp_has_no_public_name_for_waiting_for_writes fails then.


def gather_after_writes(root: FSDPModule) -> None:
    context = root._get_fsdp_state()._comm_ctx
    for stream in (getattr(context, "all_gather_copy_in_stream", None), getattr(context, "all_gather_stream", None)):
        if isinstance(stream, torch.cuda.Stream):
            stream.wait_stream(torch.cuda.current_stream())
