"""Optimizers: parameter groups with their own learning rates and weight decays, and bit-identical fused steps.

Padded fused steps give the same bits on any number of processes.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.training.losses import float32


def groups(
    net: nn.Module,
    params: Sequence[Tensor] | None = None,
    *,
    lr: float,
    weight_decay: float = 0.0,
    no_decay: bool = False,
    layer_decay: float | None = None,
    head_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer. Parameters with the same learning rate and weight decay share a group.

    Args:
        params: the parameters to group; None: all of the network. Those of other modules have the rate `lr`.
        no_decay: no weight decay for vectors (biases, norms) and for what the network's `no_weight_decay()` names.
        layer_decay: a layer's rate is this factor times the rate of the next layer (BEiT, Bao et al. 2022).
        head_lr: the rate of the head.
    """
    layer_index, head = layers(net), {id(p) for p in head_of(net).parameters()}
    last_layer = max(layer_index.values(), default=0)
    no_decay_names = set(getattr(net, "no_weight_decay", set)())
    grouped: dict[tuple[float, float], list[Tensor]] = defaultdict(list)
    names = {id(p): name for name, p in net.named_parameters()}
    for p in net.parameters() if params is None else params:
        name = names.get(id(p), "")
        rate = lr * (layer_decay or 1.0) ** (last_layer - layer_index.get(name, last_layer))
        if head_lr is not None and id(p) in head:
            rate = head_lr
        grouped[rate, 0.0 if no_decay and (p.dim() <= 1 or name in no_decay_names) else weight_decay].append(p)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in grouped.items()]


def layers(net: nn.Module) -> dict[str, int]:
    """The layer of each parameter, from 0 at the input: by the network's `group_matcher()` (as in timm) or `blocks`."""
    matcher = getattr(net, "group_matcher", None)
    if matcher is not None:
        from timm.models import group_parameters

        return group_parameters(net, matcher(coarse=False), reverse=True)
    layer_index = dict.fromkeys((name for name, _ in net.named_parameters()), 0)
    for number, (prefix, block) in enumerate(blocks(net)):
        layer_index |= {f"{prefix}.{name}": number for name, _ in block.named_parameters()}
    return layer_index


def blocks(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a network that have parameters, in order. A list of modules is replaced by its members."""
    for name, child in net.named_children():
        is_list = isinstance(child, nn.Sequential | nn.ModuleList)
        members = [(f"{name}.{key}", module) for key, module in child.named_children()] if is_list else [(name, child)]
        yield from ((path, module) for path, module in members if any(True for _ in module.parameters()))


def add_base(target: Any, base: type, **attributes: Any) -> None:
    """Makes `base` the first base of an object's class. Keys, compiled graphs and replicas stay correct, unlike with a wrapper or hooks."""
    cls = type(target)
    target.__class__ = type(cls.__name__, (base, cls), {"__module__": cls.__module__, **attributes})


class Float32(nn.Module):
    """First base class of a module that computes in float32 where autocast would not."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = next((x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), "cpu")
        is_autocast = torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False):
            args, kwargs = float32((args, kwargs)) if is_autocast else (args, kwargs)
            return super().forward(*args, **kwargs)


def compute_in_float32(head: nn.Module) -> None:
    for module in head if isinstance(head, nn.ModuleList) else [head]:
        add_base(module, Float32)


def head_of(net: nn.Module) -> nn.Module:
    """The result of the network's `get_classifier()` (as in timm), or the last module with its own parameters."""
    get_classifier = getattr(net, "get_classifier", None)
    if get_classifier is not None:
        head = get_classifier()
        return nn.ModuleList(head) if isinstance(head, tuple | list) else head
    return [net, *(module for module in net.modules() if any(True for _ in module.parameters(recurse=False)))][-1]


def begin_momentum(optimizer: Optimizer) -> None:
    """Initialises momentum with zeros before a parameter's first step. The first step's result does not change.

    torch's fused SGD (2.13) fails if some parameters got gradients earlier than others, for example next to a part that
    was frozen. If the gradients of the first step overflow, it continues from uninitialised memory.
    """
    is_torch_sgd = isinstance(optimizer, SGD) and not isinstance(optimizer, PaddedFusedStep)
    for group in optimizer.param_groups if is_torch_sgd else ():
        if group["fused"] and group["momentum"] and not group["dampening"]:
            for p in group["params"]:
                if p.grad is not None and not optimizer.state.get(p):
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


# --- The padded fused step: fused optimizers on CPUs, bit-identical however tensors are divided among processes ---
#
# torch's fused kernels (2.13) compute full SIMD vectors and the remaining elements at the end of a tensor with
# different instructions, which round differently. Here the optimizer gets the full vectors of each tensor, and its
# remainder padded to a vector. An AdamW step on the 11 million parameters of ResNet-18 takes 6 ms fused and 45 ms
# otherwise, on one thread.

VECTOR = 64  # bytes of an AVX-512 vector; a multiple of the vectors of AVX2 and NEON


def local_parts(grads: list[Tensor]) -> list[Tensor]:
    """The gradients, or this process's shards of them."""
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


class PaddedFusedStep(Optimizer):
    """The first base of an optimizer's class: its step runs on padded vectors.

    If a parameter has no state yet, the step is not fused: it creates the states.
    """

    @Optimizer.profile_hook_step  # hooks see the parameters, not their parts
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), self.padded():
            super().step.__wrapped__(self)  # type: ignore[attr-defined]  # without hooks
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch's marker

    @contextmanager
    def padded(self) -> Iterator[None]:
        """Replaces parameters by their parts within the block."""
        all_params = [group["params"] for group in self.param_groups]
        with_grad = [[p for p in params if p.grad is not None] for params in all_params]
        fused = all(self.state.get(p) for params in with_grad for p in params)
        tails: list[tuple[Tensor, Tensor]] = []  # the ends of tensors, and their padded copies
        try:
            for group, params in zip(self.param_groups, with_grad, strict=True):
                group["fused"] = fused
                if fused:
                    group["params"] = [stand_in for p in params for stand_in in self.parts(p, tails)]
            yield
        finally:
            for tail, padded_tail in tails:
                tail.copy_(padded_tail)
            for group, params in zip(self.param_groups, all_params, strict=True):
                for stand_in in group["params"] if group["params"] is not params else ():
                    del self.state[stand_in]
                group["params"], group["fused"] = params, True

    def parts(self, p: Tensor, tails: list[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """The tensors that replace a parameter during a step, with gradients and states. Appends its end to `tails`."""
        state = self.state[p]
        # States with a value per element; the step counter is not one.
        names = [name for name, value in state.items() if isinstance(value, Tensor) and name != "step"]
        assert p.grad is not None
        flat = [value.detach().view(-1) for value in local_parts([p, p.grad, *(state[name] for name in names)])]
        size = VECTOR // flat[0].element_size()
        remainder = len(flat[0]) % size
        aligned = len(flat[0]) - remainder
        yield self.part([x[:aligned] for x in flat], names, state)
        if remainder:
            padded = [torch.cat([x[aligned:], x.new_zeros(size - remainder)]) for x in flat]
            tails += [(x[aligned:], padded_x[:remainder]) for x, padded_x in zip(flat, padded, strict=True)]
            counter = {"step": state["step"].clone()} if "step" in state else {}
            yield self.part(padded, names, {**state, **counter})

    def part(self, flat: list[Tensor], names: list[str], state: dict[str, Any]) -> Tensor:
        stand_in, stand_in.grad, *values = flat
        self.state[stand_in] = {**state, **dict(zip(names, values, strict=True))}
        return stand_in


def padded_fused(optimizer: Optimizer) -> Optimizer:
    """Pads the fused steps of an optimizer on a CPU from now on, and returns it."""
    if not optimizer.defaults.get("fused") or optimizer.param_groups[0]["params"][0].device.type != "cpu":
        return optimizer
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not p.is_contiguous():  # shards are contiguous
                p.data = p.data.contiguous()
    add_base(optimizer, PaddedFusedStep)
    return optimizer


def scheduler(make: Callable[..., LRScheduler], optimizer: Optimizer, total_steps: float) -> LRScheduler:
    """The schedule of an optimizer. Passes `total_steps` if the signature has it and the config does not set it."""
    unset = "total_steps" in inspect.signature(make).parameters and "total_steps" not in getattr(make, "keywords", ())
    made = make(optimizer, **({"total_steps": total_steps} if unset else {}))
    made.counts_steps = unset  # type: ignore[attr-defined]
    return made
