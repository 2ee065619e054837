"""Clips gradients by their norm, equally under every strategy."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


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
