"""The micro-batches of a step as `exact.shards` logical ranks, whichever process computes them (docs/exact.md).

Each is forwarded by itself, with its own random numbers and batch statistics, from the same buffers. Their gradients and their
statistics are added in one fixed tree (tree_sums.py), so a step has the same bits on any number of processes.
"""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.training.steps import logical_rank
from lockstep.training.tree_sums import TreeSum, add_over_processes, tree_sum


class LogicalRanks:
    """Collects what the logical ranks of this process leave in the network during a step."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.gradients = TreeSum()
        self.first: list[Tensor] = []  # the gradients of the step's first logical rank
        self.before: list[Tensor] = []  # the buffers before the step
        self.statistics: list[Tensor] = []  # the buffers after each logical rank, as one vector
        self.losses: dict[int, Tensor] = {}  # of the current step, by logical rank

    def begin(self, net: nn.Module, trainer: pl.Trainer, batch_idx: int) -> None:
        """Before the forward of a micro-batch: the buffers are as they were before the step."""
        self.rank, self.part = logical_rank(trainer, batch_idx), batch_idx % trainer.accumulate_grad_batches
        buffers = list(net.buffers())
        if self.part == 0:
            assert not self.first, "the micro-batches before this one are no whole step"
            self.before, self.statistics, self.losses = [buffer.clone() for buffer in buffers], [], {}
            return
        for buffer, before in zip(buffers, self.before, strict=True):
            buffer.copy_(before)

    def undivided(self, loss: Tensor, trainer: pl.Trainer) -> Tensor:
        """The loss times the number that Lightning divides it by: in each gradient that could round the smallest, so `end` divides
        their sum."""
        self.losses[self.rank] = loss.detach()
        return loss * trainer.accumulate_grad_batches

    @torch.no_grad()
    def end(self, net: nn.Module, trainer: pl.Trainer) -> None:
        """After the backward of a micro-batch. After the last one of the step, gradients and buffers are those of the global batch."""
        own, buffers = self.taken_gradients(net), averaged(net)
        self.gradients.add(own)
        # divided first, so constants stay as they are, even the largest number
        shares = [(buffer / self.count).reshape(-1) for buffer in buffers]
        self.statistics.append(torch.cat([own[0].new_zeros(0), *shares]))
        if self.part + 1 < trainer.accumulate_grad_batches:
            return
        gradients, statistics = self.gradients.total(), torch.stack(self.statistics)
        if trainer.strategy.in_blocks:  # type: ignore[attr-defined]
            statistics = tree_sum(statistics)
            add_over_processes([*gradients, statistics])
        else:  # a logical rank's neighbours are in other processes, and the strategy has added the gradients of all
            add_over_processes([statistics])
            statistics = tree_sum(statistics)
        torch._foreach_mul_(gradients, 1 / self.count)
        for buffer, mean in zip(buffers, statistics.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(mean.view(buffer.shape))
        for parameter, gradient in zip(trained(net), self.first, strict=True):
            parameter.grad = gradient  # the total lies in the memory of the first logical rank's
        self.first, self.before, self.statistics = [], [], []

    def taken_gradients(self, net: nn.Module) -> list[Tensor]:
        """Takes the gradients, or this process's shards of them, from the parameters. A parameter without one has zeros: it may have
        one in another logical rank."""
        taken = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained(net)]
        for parameter in trained(net):
            parameter.grad = None
        if self.part == 0:
            self.first = taken
        return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in taken]


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def averaged(net: nn.Module) -> list[Tensor]:
    """Running means and their like, not counters, which each logical rank leaves the same."""
    return [buffer for buffer in net.buffers() if buffer.is_floating_point()]
