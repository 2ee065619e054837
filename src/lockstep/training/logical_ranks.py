"""The micro-batches of a step as `exact.shards` logical ranks, and sums whose bits do not depend on who computes which part (docs/exact.md)."""

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lockstep.training.steps import logical_rank

# --- Sums whose bits do not depend on who computes which part: the addends are leaves of one fixed binary tree ---
#
# A ring all-reduce adds in an order that depends on the number of processes, and float additions round. Here a leaf is a logical
# rank. Each process adds up a whole subtree, then the processes exchange their sums and add those in the order of the tree. Two
# alternatives cost more: gathering all sums sends as many times more bytes as there are processes, and integers of a common
# exponent take twice the bytes and an exchange of exponents first.

dist: Any = torch.distributed
AT_ONCE = 2**21  # elements: with 2^24, copies and new pages made an exchange of 44 MB three times as long


def tree_sum(parts: Tensor) -> Tensor:
    """The sum over dimension 0, whose size is a power of two: neighbours in pairs, then neighbouring pairs, and so on."""
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


class TreeSum:
    """Adds lists of tensors that come one after the other, in the order of `tree_sum`; holds one list for each level of the tree.

    The tensors of the lists are changed in place.
    """

    def __init__(self) -> None:
        self.levels: list[list[Tensor] | None] = []  # at i: the sum of 2^i neighbours, if its partner is still to come

    def add(self, tensors: list[Tensor]) -> None:
        for level, left in enumerate(self.levels):
            if left is None:
                self.levels[level] = tensors
                return
            torch._foreach_add_(left, tensors)
            tensors, self.levels[level] = left, None
        self.levels.append(tensors)

    def total(self) -> list[Tensor]:
        """The sum of all lists, whose number must be a power of two; the next `add` begins a new sum."""
        *lower, top = self.levels
        assert top is not None and not any(lower), "the number of lists is no power of two"
        self.levels = []
        return top


def reduce_scatter(mine: Tensor, group: Any = None) -> Tensor:
    """This process's part of the sum of all processes' vectors. Their length is a multiple of the number of processes."""
    parts = torch.empty_like(mine)
    dist.all_to_all_single(parts, mine, group=group)
    return tree_sum(parts.view(dist.get_world_size(group), -1))


def gather(mine: Tensor) -> Tensor:
    """The vectors of all processes, one after the other. For 11 MB of each of four processes gloo's own takes 78 ms, this 27."""
    repeated = mine.repeat(dist.get_world_size())
    found = torch.empty_like(repeated)
    dist.all_to_all_single(found, repeated)
    return found


def add_over_processes(tensors: Sequence[Tensor]) -> None:
    """Replaces each tensor by the sum over all processes. It sends as many bytes as a ring."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return
    for bucket in buckets(tensors):
        sizes = [part.numel() for part in bucket]
        padding = bucket[0].new_zeros(-sum(sizes) % world)
        flat = [*(part.reshape(-1) for part in bucket), *([padding] if len(padding) else [])]
        total = torch.cat(flat) if len(flat) > 1 else flat[0]
        if world == 2:  # one addition, which has no order
            dist.all_reduce(total)
        else:
            total = gather(reduce_scatter(total))
        for part, found in zip(bucket, total.split([*sizes, len(padding)]), strict=False):
            if found.data_ptr() != part.data_ptr():  # a large tensor was added up in its place
                part.copy_(found.view(part.shape))


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype that are exchanged at once, or a part of a large one, which needs no copy."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket, room = list[Tensor](), AT_ONCE
        for tensor in tensors:
            if tensor.dtype != dtype:
                continue
            for part in tensor.view(-1).split(AT_ONCE) if tensor.is_contiguous() else [tensor]:
                if part.numel() > AT_ONCE // 4:
                    yield [part]
                    continue
                if part.numel() > room:
                    yield bucket
                    bucket, room = [], AT_ONCE
                bucket.append(part)
                room -= part.numel()
        if bucket:
            yield bucket


class TreeReduceScatter:
    """What FSDP2 calls in place of torch's reduce-scatter (`set_custom_reduce_scatter`)."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM
        output_tensor.copy_(reduce_scatter(input_tensor, group))


# --- The micro-batches of a step as `exact.shards` logical ranks, whichever process computes them (docs/exact.md) ---
#
# Each is forwarded by itself, with its own random numbers and batch statistics, from the same buffers. Their gradients and their
# statistics are added in one fixed tree (tree_sums.py), so a step has the same bits on any number of processes.


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


# --- Fused optimizers on CPUs with the same bits however tensors are divided among processes ---
#
# torch's fused kernels (2.13) compute whole vectors of elements with other instructions than the elements that are left at the end
# of a tensor, which round differently. Here the optimizer gets the whole vectors of each tensor, and the rest of it padded to a vector.
# A step of AdamW on the 11 million parameters of ResNet-18 takes 6 ms fused and 45 ms otherwise, on one thread.

VECTOR = 64  # bytes: of AVX-512, and a multiple of the vectors of AVX2 and NEON


class WholeVectors:
    """Stands between gradients and step: call `begin` after clipping; the step's hook ends it.

    A step before which a parameter has no state is not fused: it makes the states.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.given: list[list[Tensor]] = []  # the parameters of each group during a step
        self.padded: list[tuple[Tensor, Tensor]] = []  # the ends of tensors, and where they lie during a step
        for group in optimizer.param_groups:
            for p in group["params"]:
                if not p.is_contiguous():  # shards are
                    p.data = p.data.contiguous()
        optimizer.register_step_post_hook(lambda *_: self.end())

    @torch.no_grad()
    def begin(self) -> None:
        groups, states = self.optimizer.param_groups, self.optimizer.state
        trained = [[p for p in group["params"] if p.grad is not None] for group in groups]
        fused = all(states.get(p) for params in trained for p in params)
        self.given = [group["params"] for group in groups]
        for group, params in zip(groups, trained, strict=True):
            group["fused"] = fused
            if fused:
                group["params"] = [part for p in params for part in self.parts(p)]
        for end, there in self.padded:
            there.copy_(end)

    def parts(self, p: Tensor) -> list[Tensor]:
        """What stands for a parameter during a step, with gradients and states."""
        state = self.optimizer.state[p]
        # a value of each element; the step counter is no such value
        names = [name for name, value in state.items() if isinstance(value, Tensor) and name != "step"]
        flat = [flattened(value) for value in (p, p.grad, *(state[name] for name in names))]
        size = VECTOR // flat[0].element_size()
        whole = len(flat[0]) - len(flat[0]) % size
        found = [self.part([each[:whole] for each in flat], names, state)]
        if ends := [each[whole:] for each in flat if whole < len(each)]:
            padded = [end.new_zeros(size) for end in ends]
            self.padded += [(end, there[: len(end)]) for end, there in zip(ends, padded, strict=True)]
            counted = {"step": state["step"].clone()} if "step" in state else {}
            found.append(self.part(padded, names, {**state, **counted}))
        return found

    def part(self, flat: list[Tensor], names: list[str], state: dict[str, Any]) -> Tensor:
        made, made.grad, *values = flat
        self.optimizer.state[made] = {**state, **dict(zip(names, values, strict=True))}
        return made

    @torch.no_grad()
    def end(self) -> None:
        for end, there in self.padded:
            end.copy_(there)
        for group, params in zip(self.optimizer.param_groups, self.given, strict=False):
            if group["params"] is not params:
                for part in group["params"]:
                    del self.optimizer.state[part]
            group["params"], group["fused"] = params, True
        self.given, self.padded = [], []


def flattened(x: Tensor | None) -> Tensor:
    """The elements of a contiguous tensor, or of this process's shard of it."""
    assert x is not None
    return (x.to_local() if isinstance(x, DTensor) else x.detach()).view(-1)
