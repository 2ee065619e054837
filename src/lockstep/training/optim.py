"""Optimizers: parameters in groups, each with its learning rate and weight decay; and fused steps with the same bits on any number of processes."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer


def groups(
    net: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    no_decay: bool = False,
    layer_decay: float | None = None,
    head_lr: float | None = None,
) -> list[dict[str, Any]]:
    """For an optimizer. Parameters with the same rate and decay share a group.

    Args:
        no_decay: no weight decay for vectors (biases, norms) and for what the network names in `no_weight_decay()`.
        layer_decay: the rate of a layer is this factor times the rate of the next one (BEiT, Bao et al. 2022).
        head_lr: the rate of the head.
    """
    layer, head = layers(net), {id(p) for p in head_of(net).parameters()}
    last = max(layer.values(), default=0)
    spared = set(getattr(net, "no_weight_decay", set)())
    found: dict[tuple[float, float], list[Tensor]] = defaultdict(list)
    for name, p in net.named_parameters():
        rate = lr * (layer_decay or 1.0) ** (last - layer[name])
        if head_lr is not None and id(p) in head:
            rate = head_lr
        found[rate, 0.0 if no_decay and (p.dim() <= 1 or name in spared) else weight_decay].append(p)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in found.items()]


def layers(net: nn.Module) -> dict[str, int]:
    """The layer of each parameter, from 0 at the input: as the network's `group_matcher()` says (timm's have one), or by `blocks`."""
    matcher = getattr(net, "group_matcher", None)
    if matcher is not None:
        from timm.models import group_parameters

        return group_parameters(net, matcher(coarse=False), reverse=True)
    found = dict.fromkeys((name for name, _ in net.named_parameters()), 0)
    for number, (prefix, block) in enumerate(blocks(net)):
        found |= {f"{prefix}.{name}": number for name, _ in block.named_parameters()}
    return found


def blocks(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a network with parameters, in order; of a list of modules, its members."""
    for name, child in net.named_children():
        listed = isinstance(child, nn.Sequential | nn.ModuleList)
        members = [(f"{name}.{own}", each) for own, each in child.named_children()] if listed else [(name, child)]
        yield from ((path, each) for path, each in members if any(True for _ in each.parameters()))


def head_of(net: nn.Module) -> nn.Module:
    """What `get_classifier()` of the network returns (timm's have one), or the last module with parameters of its own."""
    known = getattr(net, "get_classifier", None)
    if known is not None:
        found = known()
        return nn.ModuleList(found) if isinstance(found, tuple | list) else found
    return [module for module in net.modules() if any(True for _ in module.parameters(recurse=False))][-1]


def begin_momentum(optimizer: Optimizer) -> None:
    """Zeros for parameters before their first step, which computes the same from them.

    torch's fused SGD (2.13) fails where some parameters got gradients earlier, as beside a frozen part; and where the gradients of the
    first step overflow, it goes on from memory that nobody wrote.
    """
    is_torchs = isinstance(optimizer, SGD) and not isinstance(optimizer, PaddedFusedStep)
    for group in optimizer.param_groups if is_torchs else ():
        if group["fused"] and group["momentum"] and not group["dampening"]:
            for p in group["params"]:
                if p.grad is not None and not optimizer.state.get(p):
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


# --- The padded fused step: fused optimizers on CPUs with the same bits however tensors are divided among processes ---
#
# torch's fused kernels (2.13) compute whole vectors of elements with other instructions than the elements that are left at the end
# of a tensor, which round differently. Here the optimizer gets the whole vectors of each tensor, and the rest of it padded to a vector.
# A step of AdamW on the 11 million parameters of ResNet-18 takes 6 ms fused and 45 ms otherwise, on one thread.

VECTOR = 64  # bytes: of AVX-512, and a multiple of the vectors of AVX2 and NEON


def local_parts(grads: list[Tensor]) -> list[Tensor]:
    """Themselves, or this process's shards of them."""
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


class PaddedFusedStep(Optimizer):
    """The first base of an optimizer's class, whose step gets padded vectors.

    A step before which a parameter has no state is not fused: it makes the states.
    """

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), self.padded():
            super().step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch's mark: the step of the second base calls the hooks

    @contextmanager
    def padded(self) -> Iterator[None]:
        """Swaps parameters for their parts, within the block."""
        whole = [group["params"] for group in self.param_groups]
        trained = [[p for p in params if p.grad is not None] for params in whole]
        fused = all(self.state.get(p) for params in trained for p in params)
        ends: list[tuple[Tensor, Tensor]] = []  # the ends of tensors, and where they are during the step
        try:
            for group, params in zip(self.param_groups, trained, strict=True):
                group["fused"] = fused
                if fused:
                    group["params"] = [part for p in params for part in self.parts(p, ends)]
            yield
        finally:
            for end, there in ends:
                end.copy_(there)
            for group, params in zip(self.param_groups, whole, strict=True):
                for part in group["params"] if group["params"] is not params else ():
                    del self.state[part]
                group["params"], group["fused"] = params, True

    def parts(self, p: Tensor, ends: list[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """What stands for a parameter during a step, with gradients and states. Its end is noted in `ends`."""
        state = self.state[p]
        # a value of each element; the step counter is no such value
        names = [name for name, value in state.items() if isinstance(value, Tensor) and name != "step"]
        assert p.grad is not None
        flat = [value.detach().view(-1) for value in local_parts([p, p.grad, *(state[name] for name in names)])]
        size = VECTOR // flat[0].element_size()
        rest = len(flat[0]) % size
        whole = len(flat[0]) - rest
        yield self.part([each[:whole] for each in flat], names, state)
        if rest:
            padded = [torch.cat([each[whole:], each.new_zeros(size - rest)]) for each in flat]
            ends += [(each[whole:], there[:rest]) for each, there in zip(flat, padded, strict=True)]
            counted = {"step": state["step"].clone()} if "step" in state else {}
            yield self.part(padded, names, {**state, **counted})

    def part(self, flat: list[Tensor], names: list[str], state: dict[str, Any]) -> Tensor:
        made, made.grad, *values = flat
        self.state[made] = {**state, **dict(zip(names, values, strict=True))}
        return made


def padded_fused(optimizer: Optimizer) -> Optimizer:
    """`optimizer`, whose fused steps are padded from now on."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not p.is_contiguous():  # shards are
                p.data = p.data.contiguous()
    kind: Any = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (PaddedFusedStep, kind), {"__module__": kind.__module__})
    return optimizer
