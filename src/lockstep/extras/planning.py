"""What a training step needs: operations and memory, counted on the meta device, and the time on devices of a stated kind, by strategy."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from lockstep.checkpoints.finding import leaves
from lockstep.data.datamodule import DataModule
from lockstep.strategies.fsdp import repeated_blocks
from lockstep.training.task import Task

# --- What a training step needs, counted on the meta device: no memory, no numbers ---

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


def costs(module: Task, data: DataModule, net: nn.Module) -> Costs:
    """`net` is the network on the meta device. Raises whatever it raises there."""
    few, flops = kept(module, data, net, FEW)
    more, _ = kept(module, data, net, MORE)
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


def tensor_bytes(tree: Any) -> int:
    """Of all tensors in `tree`, each counted once; the whole of a sharded tensor."""
    tensors = {id(leaf): leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def state_bytes(optimizer: Optimizer) -> int:
    """The size of an optimizer's state after a step on the meta device; 0 if it cannot step there."""
    for group in optimizer.param_groups:
        group.update(dict.fromkeys(group.keys() & {"fused", "foreach", "capturable"}, False))
        for p in group["params"]:
            p.grad = torch.empty_like(p) if p.requires_grad else None
    try:
        optimizer.step()
    except Exception:
        return 0
    return tensor_bytes(list(optimizer.state.values()))


def kept(module: Task, data: DataModule, net: nn.Module, samples: int) -> tuple[int, int]:
    """The bytes that backward keeps of a forward pass, without parameters, and the operations of both."""
    own = {StorageWeakRef(p.untyped_storage()) for p in net.parameters()}
    seen: dict[StorageWeakRef, Any] = {}  # tensors may share a storage; kept, so that no other gets its place

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if (key := StorageWeakRef(storage)) not in own:
            seen[key] = storage
        return tensor

    batch = move_data_to_device(data.example(samples), torch.device("meta"))
    task = module.copied().to("meta")
    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = task.loss(task.outputs(net, batch), batch).sum()
        loss.backward()
    net.zero_grad(set_to_none=True)
    return sum(storage.nbytes() for storage in seen.values()), int(counter.get_total_flops())


# --- Memory and time of a step on devices of a stated kind, by strategy ---
#
# Time: the operations over the rate that the device reaches, and the communication by the alpha-beta model (Hockney 1994): a message
# of n bytes takes alpha + n / beta. Rings of p devices send 2 (p - 1) / p of the bytes for an all-reduce and (p - 1) / p for an
# all-gather or reduce-scatter (Thakur, Rabenseifner and Gropp 2005). It overlaps with the backward pass, two thirds of a step.

BACKWARD = 2 / 3  # of a step's time
BUCKET_BYTES = 25 * 2**20  # DDP's


@dataclass(frozen=True)
class Device:
    """Rates are the makers' peaks for dense matrices; links are what collectives reach, in one direction."""

    memory_bytes: float
    half_flops: float  # bf16 or fp16
    full_flops: float  # fp32
    link: float  # bytes/s between devices of a node


# Memory and peaks: NVIDIA's data sheets. Links: about 0.8 of NVLink's rate in one direction, or of PCIe's.
DEVICES = {
    "h100": Device(80e9, 989e12, 67e12, 360e9),
    "h200": Device(141e9, 989e12, 67e12, 360e9),
    "a100": Device(80e9, 312e12, 19.5e12, 240e9),
    "a100-40gb": Device(40e9, 312e12, 19.5e12, 240e9),
    "l40s": Device(48e9, 362e12, 91.6e12, 25e9),
    "l4": Device(24e9, 121e12, 30.3e12, 25e9),
    "v100": Device(32e9, 125e12, 15.7e12, 120e9),
    "t4": Device(16e9, 65e12, 8.1e12, 12e9),
    "rtx4090": Device(24e9, 165e12, 82.6e12, 25e9),
}
ALPHA_S = 20e-6  # latency of a message between devices of a node, with its launch
ALPHA_NODES_S = 40e-6
RESERVED = 0.08  # of the memory: the CUDA context, fragments, workspaces


@dataclass(frozen=True)
class Setting:
    """How the devices are used."""

    world: int
    nodes: int
    shards: bool
    half: bool  # mixed precision
    micro_batch: int
    accumulate: int
    copies: int = 0  # of the weights: a moving average


@dataclass(frozen=True)
class Plan:
    memory_bytes: float  # per device
    largest_micro_batch: int  # that fits; 0 if none does
    communicated_bytes: float  # per device and step
    compute_s: float
    communication_s: float  # if nothing else ran
    step_s: float


def communication(costs: Costs, of: Setting, device: Device, between_nodes: float) -> tuple[float, float]:
    """Bytes that a device sends in a step, and the seconds that takes."""
    share = (of.world - 1) / of.world  # 0 for one device
    link, alpha = (device.link, ALPHA_S) if of.nodes == 1 else (min(device.link, between_nodes), ALPHA_NODES_S)
    if of.shards:
        gathered = costs.weight_bytes * (0.5 if of.half else 1.0)
        sent = share * (2 * gathered * of.accumulate + costs.gradient_bytes)
        messages = costs.blocks * (2 * of.accumulate + 1)
    else:
        sent = 2 * share * costs.gradient_bytes
        messages = math.ceil(costs.gradient_bytes / BUCKET_BYTES)
    return sent, sent / link + messages * alpha * math.log2(of.world)


def plan(costs: Costs, of: Setting, device: Device, *, utilisation: float, between_nodes: float = 45e9) -> Plan:
    """`utilisation`: the share of the device's peak that the network reaches. `between_nodes`: bytes/s per device."""
    half = 0.5 if of.half else 1.0
    kept = costs.weight_bytes * (1 + of.copies) + costs.gradient_bytes + costs.optimizer_bytes
    if of.shards and of.world > 1:  # the next block is gathered while one computes
        fixed = kept / of.world + 2 * half * costs.largest_block_bytes + costs.fixed_bytes
    else:  # autocast keeps a copy of the weights in half precision
        fixed = kept + (costs.weight_bytes * half if of.half else 0.0) + costs.fixed_bytes
    each = costs.activation_bytes * half
    room = device.memory_bytes * (1 - RESERVED) - fixed
    rate = utilisation * (device.half_flops if of.half else device.full_flops)
    compute_s = costs.flops * of.micro_batch * of.accumulate / rate
    sent, communication_s = communication(costs, of, device, between_nodes)
    hidden = compute_s if of.shards else BACKWARD * compute_s / of.accumulate
    return Plan(
        memory_bytes=fixed + each * of.micro_batch,
        largest_micro_batch=max(0, int(room // each)) if each else 0,
        communicated_bytes=sent,
        compute_s=compute_s,
        communication_s=communication_s,
        step_s=compute_s + max(0.0, communication_s - hidden),
    )
