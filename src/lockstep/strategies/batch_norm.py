"""Batch normalisation over the micro-batches of all processes, on CPUs and on GPUs.

torch.nn.SyncBatchNorm does not support CPU tensors. `GlobalBatchNorm` computes the same with two differentiable
all-reduces: of sums and counts, then of squared deviations. On GPUs torch's SyncBatchNorm is used, because it has fused
kernels.

On a CPU, a single process uses `GlobalBatchNorm` too. torch's CPU kernel for channels_last sums naively: its error is
3e-6 for 64 images of 28 pixels and 3e-5 for 16 of 168 (7e-8 in the other format), so one process would differ from
several by that much.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.compat.torch import without_masks
from lockstep.errors import UserError
from lockstep.training.losses import SumOverProcesses

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class GlobalBatchNorm(nn.BatchNorm2d):
    """Batch norm of any dimension with statistics over all processes. Parameters, buffers and keys stay the same."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalises over all dimensions but 1. Evaluation uses torch's batch norm."""
        if not self.training:
            mean, var = self.running_mean, self.running_var
            return self.activated(F.batch_norm(input, mean, var, self.weight, self.bias, mean is None, 0.0, self.eps))
        x = input if input.dtype == torch.float64 else input.float()
        axes = [0, *range(2, x.dim())]
        shape = [1, -1, *([1] * (x.dim() - 2))]
        count = torch.full((1,), float(x.numel() // x.shape[1]), device=x.device)
        sums = SumOverProcesses.apply(torch.cat([x.sum(axes), count]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = x - mean.view(shape)
        var = SumOverProcesses.apply(centred.square().sum(axes)) / count
        self.update_running(mean.detach(), var.detach() * count / (count - 1).clamp(min=1))
        y = centred * torch.rsqrt(var + self.eps).view(shape)
        if self.weight is not None:
            y = y * self.weight.view(shape)
        if self.bias is not None:
            y = y + self.bias.view(shape)
        return self.activated(y.to(input.dtype))

    def activated(self, y: Tensor) -> Tensor:
        for name in ("drop", "act"):  # of timm's BatchNormAct2d
            module = getattr(self, name, None)
            y = module(y) if isinstance(module, nn.Module) else y
        return y

    @torch.no_grad()
    def update_running(self, mean: Tensor, unbiased_var: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased_var.to(self.running_var.dtype), momentum)


SYNCHRONISED = (GlobalBatchNorm, nn.SyncBatchNorm)


def synchronise(net: nn.Module, device_type: str) -> None:
    """Replaces every batch norm of `net` with a synchronised one, in place. Raises UserError if there is none."""
    norms = [module for module in net.modules() if isinstance(module, NORMS)]
    if not norms:
        raise UserError(
            "trainer.sync_batchnorm=true has no effect: this network has no batch normalisation. Remove it."
        )
    if device_type == "cuda":
        # torch's converter drops the activation of timm's BatchNormAct2d; timm's converter keeps it.
        timm_layers = sys.modules.get("timm.layers")
        convert = timm_layers.convert_sync_batchnorm if timm_layers else nn.SyncBatchNorm.convert_sync_batchnorm
        convert(net)
        without_masks()
        return
    for norm in norms:
        norm.__class__ = GlobalBatchNorm  # keeps parameters, buffers, hooks, and the activation of timm's layers
