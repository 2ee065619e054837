"""Sums whose bits do not depend on which process computes which part: the addends are leaves of one fixed binary tree.

A ring all-reduce adds in an order that depends on the number of processes, and float additions round. Here a leaf is a logical
rank. Each process adds up a whole subtree. Then the processes exchange their sums and add those in the order of the tree. Two
alternatives cost more: gathering all sums sends as many times more bytes as there are processes, and integers of a common
exponent take twice the bytes and an exchange of exponents first.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

dist: Any = torch.distributed
AT_ONCE = 2**21  # elements: with 2^24, copies and new pages made an exchange of 44 MB three times as long


def tree_sum(parts: Tensor) -> Tensor:
    """The sum over dimension 0, whose size is a power of two: neighbours in pairs, then neighbouring pairs, and so on."""
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


class TreeReduction:
    """Adds lists of tensors that come one after the other, in the order of `tree_sum`, in place."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: list[list[Tensor]] = []  # one for each bit of `count`: of so many neighbours

    def add(self, tensors: list[Tensor]) -> None:
        self.count += 1
        self.sums.append(tensors)
        while len(self.sums) > self.count.bit_count():  # the last two are of equally many neighbours
            right = self.sums.pop()
            torch._foreach_add_(self.sums[-1], right)

    def total(self) -> list[Tensor]:
        """The sum of all lists, whose number must be a power of two; the next `add` begins a new sum."""
        assert len(self.sums) == 1, "the number of lists is no power of two"
        self.count = 0
        return self.sums.pop()


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
        padding = -sum(sizes) % world
        flat = [part.reshape(-1) for part in bucket]
        total = flat[0] if len(flat) == 1 and not padding else torch.cat([*flat, flat[0].new_zeros(padding)])
        if world == 2:  # one addition, which has no order
            dist.all_reduce(total)
        else:
            total = gather(reduce_scatter(total))
        for part, found in zip(bucket, total.split([*sizes, padding]), strict=False):
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
