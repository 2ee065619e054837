"""Modules that draw random numbers outside of forward and backward, for tests/training/test_step_numbers.py."""

import os

import lightning.pytorch as pl
import torch
from kept import Plain
from torch import nn


class Langevin(torch.optim.SGD):
    """Adds noise to each update (Welling and Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics", 2011)."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.01)
        return loss


class LangevinModule(Plain):
    def configure_optimizers(self):
        return Langevin(self.parameters(), 0.05)


class ManualLangevin(LangevinModule):
    """Also draws noise for its samples, before and after the update."""

    def __init__(self, raw: bool = False) -> None:
        super().__init__()
        self.automatic_optimization, self.raw = False, raw

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=not self.raw)
        torch.rand(1 + self.global_rank)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        torch.rand(1 + self.global_rank)
        optimizer.step()


class GradientNoise(Plain):
    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.1)


class ZeroGradNoise(Plain):
    """Draws between a forward and its backward, after an odd number of draws in forward."""

    def loss(self, batch):
        torch.rand(1 + self.global_rank)
        return super().loss(batch)

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer):
        self.noise = torch.randn(1).item()

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.mul_(1 + 0.1 * self.noise)


class BackwardNoise(ZeroGradNoise):
    """Draws right before the backward."""

    def on_before_zero_grad(self, optimizer):
        pass

    def on_before_backward(self, loss):
        self.noise = torch.randn(1).item()


class EpochScale(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def on_train_epoch_start(self):
        self.scale.fill_(torch.rand(()).item() + 0.5)

    def loss(self, batch):
        return super().loss(batch) * self.scale


class WeightNoise(pl.Callback):
    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for p in pl_module.parameters():
            p.add_(torch.randn_like(p), alpha=0.01)


class LateLayers(Plain):
    """Draws layers after the constructor has drawn others."""

    def __init__(self) -> None:
        super().__init__()
        self.late = None

    def configure_model(self):
        if self.late is None:
            self.late = nn.Linear(6, 6)

    def on_fit_start(self):
        nn.init.normal_(self.head.weight)

    def forward(self, x):
        return super().forward(self.late(x))


class Everything(GradientNoise, ZeroGradNoise, EpochScale, LangevinModule):
    """Draws in each place."""

    def on_before_optimizer_step(self, optimizer):
        GradientNoise.on_before_optimizer_step(self, optimizer)
        ZeroGradNoise.on_before_optimizer_step(self, optimizer)


class Drifting(Plain):
    """Each rank adds its own share to a weight, once."""

    def __init__(self, by: float = 1.0) -> None:
        super().__init__()
        self.by = by

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer):
        if self.global_step == 2:
            self.head.bias.add_(self.by * self.global_rank)


class Sets(Plain):
    """Layers in an order that depends on the rank, as that of a set does on the hash of texts."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("colour", "shape") if int(os.environ.get("LOCAL_RANK", 0)) == 0 else ("shape", "colour"):
            setattr(self, name, nn.Linear(6, 6))

    def forward(self, x):
        return super().forward(self.colour(x) + 2 * self.shape(x))
