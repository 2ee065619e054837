"""Clips gradients by their norm, equally under every strategy."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def gradient_norm(grads: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, including other processes' shards.

    Summed in float64. torch sums in float32, where the norm of BasicNet's gradients differs by 1e-5 to 2e-5 between one
    process and two shards, always in the same direction; after 50 clipped steps the weights were 5e-5 apart.
    """
    exact = torch.float32 if grads[0].device.type == "mps" else torch.float64  # MPS has no float64
    shards = [grad for grad in grads if isinstance(grad, DTensor)]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    squared = torch.stack(torch._foreach_norm(local, 2, dtype=exact)).square().sum()
    if shards:
        torch.distributed.all_reduce(squared, group=shards[0].device_mesh.get_group())
    return squared.sqrt()


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Like torch.nn.utils.clip_grad_norm_; returns the norm before clipping."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norm = gradient_norm(grads)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in grads], scale.to(grads[0].dtype))
    return norm


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in grads], factor.to(grads[0].dtype))
