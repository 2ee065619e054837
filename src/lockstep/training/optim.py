"""The parameters of a network in groups, and their gradients clipped equally under every strategy."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# --- The parameters of a network in groups, each with its learning rate and weight decay ---


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


# --- Clips gradients by their norm, equally under every strategy ---


def local_parts(grads: list[Tensor]) -> list[Tensor]:
    """Themselves, or this process's shards of them."""
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def gradient_norm(grads: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, including other processes' shards.

    Summed in float64. torch sums in float32, where the norm of BasicNet's gradients differs by 1e-5 to 2e-5 between one
    process and two shards, always in the same direction; after 50 clipped steps the weights were 5e-5 apart.
    """
    exact = torch.float32 if grads[0].device.type == "mps" else torch.float64  # MPS has no float64
    shards = [grad for grad in grads if isinstance(grad, DTensor)]
    squared = torch.stack(torch._foreach_norm(local_parts(grads), 2, dtype=exact)).square().sum()
    if shards:
        torch.distributed.all_reduce(squared, group=shards[0].device_mesh.get_group())
    return squared.sqrt()


def exact_norm(grads: list[Tensor]) -> Tensor:
    """The 2-norm as above, with the same bits however the gradients are divided among processes; infinite if one is not finite.

    Squares of float32 are exact in float64. Those of a tensor are rounded to integers of a common exponent, to 2^-36 of the largest
    for 2^26 elements; sums of integers do not depend on their order.
    """
    local = local_parts(grads)
    most = [grad.abs().max().double() if grad.numel() else grad.new_zeros((), dtype=torch.float64) for grad in local]
    largest = torch.stack(most).nan_to_num(nan=torch.inf, posinf=torch.inf)
    groups = {grad.device_mesh.get_group() for grad in grads if isinstance(grad, DTensor)}
    over_processes(largest, torch.distributed.ReduceOp.MAX, groups)
    # of each tensor; equal in all processes, as the next two are
    unit = torch.exp2(torch.frexp(largest).exponent.double())
    grid = torch.exp2(torch.tensor([62.0 - grad.numel().bit_length() for grad in grads], dtype=torch.float64).to(unit))
    parts = zip(local, unit, grid, strict=True)
    total = torch.stack([((grad.double() / u).square() * g).round().long().sum() for grad, u, g in parts])
    over_processes(total, torch.distributed.ReduceOp.SUM, groups)
    norm = (total.double() / grid * (unit / unit.max()).square()).sum().sqrt() * unit.max()
    return norm.where(largest.isfinite().all(), torch.inf)


def over_processes(x: Tensor, op: Any, groups: set[Any]) -> None:
    for group in groups:  # none, or that of the shards
        torch.distributed.all_reduce(x, op, group=group)


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor], max_norm: float, norm_of: Callable[[list[Tensor]], Tensor] = gradient_norm
) -> Tensor:
    """Like torch.nn.utils.clip_grad_norm_; returns the norm before clipping."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norm = norm_of(grads)
    torch._foreach_mul_(local_parts(grads), (max_norm / (norm + 1e-6)).clamp(max=1.0).to(grads[0].dtype))
    return norm


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    if grads := [p.grad for p in parameters if p.grad is not None]:
        torch._foreach_mul_(local_parts(grads), factor.to(grads[0].dtype))
