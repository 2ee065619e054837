"""What a training step needs, counted on the meta device: no memory, no numbers."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from lockstep.checkpoints.room import state_bytes, tensor_bytes
from lockstep.data.datamodule import DataModule
from lockstep.strategies.fsdp import repeated_blocks
from lockstep.training.module import TaskModule

Context = Callable[[], AbstractContextManager[Any]]
FEW, MORE = 2, 4  # samples; batch norm needs two


@dataclass(frozen=True)
class Costs:
    """Of one step of a network, in fp32. Activations are what backward keeps of forward."""

    parameters: int
    trained: int  # parameters that get a gradient
    weight_bytes: int  # with buffers
    gradient_bytes: int
    optimizer_bytes: int
    largest_block_bytes: int  # what fsdp gathers at once
    blocks: int
    activation_bytes: float  # per sample
    fixed_bytes: float  # kept by backward, whatever the batch
    flops: float  # per sample, forward and backward


def costs(module: TaskModule, data: DataModule, net: nn.Module, context: Context) -> Costs:
    """`net` is the network on the meta device; `context` what training computes within.

    Raises whatever the network raises on the meta device.
    """
    few, flops = kept(module, data, net, FEW, context)
    more, _ = kept(module, data, net, MORE, context)
    each = (more - few) / (MORE - FEW)
    blocks = [tensor_bytes(list(block.parameters())) for block in repeated_blocks(net)]
    return Costs(
        parameters=sum(p.numel() for p in net.parameters()),
        trained=sum(p.numel() for p in net.parameters() if p.requires_grad),
        weight_bytes=tensor_bytes(net.state_dict(keep_vars=True)),
        gradient_bytes=tensor_bytes([p for p in net.parameters() if p.requires_grad]),
        optimizer_bytes=state_bytes(module.new_optimizer(net)),
        largest_block_bytes=max(blocks, default=tensor_bytes(list(net.parameters()))),
        blocks=len(blocks) or 1,
        activation_bytes=each,
        fixed_bytes=max(0.0, few - FEW * each),
        flops=flops / FEW,
    )


def kept(module: TaskModule, data: DataModule, net: nn.Module, samples: int, context: Context) -> tuple[int, int]:
    """The bytes that backward keeps of a forward pass, without parameters, and the operations of both."""
    own = {StorageWeakRef(p.untyped_storage()) for p in net.parameters()}
    seen: dict[StorageWeakRef, Any] = {}  # tensors may share a storage; kept, so that no other gets its place

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if (key := StorageWeakRef(storage)) not in own:
            seen[key] = storage
        return tensor

    batch = move_data_to_device(data.example(samples), torch.device("meta"))
    task = copy.deepcopy(module.task).to("meta")
    with FlopCounterMode(display=False) as counter:
        with context(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = task.loss(task.outputs(net, batch), batch).sum()
        loss.backward()
    net.zero_grad(set_to_none=True)
    return sum(storage.nbytes() for storage in seen.values()), int(counter.get_total_flops())
