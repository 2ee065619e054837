"""The samples of a batch and of a network's output, their targets, and their losses.

Losses are per sample, mixed, or between all samples of a global batch.
"""

# B batch

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lockstep.data.dataset import Batch
from lockstep.errors import UserError

# --- The samples of a batch or of an output: a tensor, or dicts, lists and tuples of tensors ---


def by_sample(tree: Any, size: int, change: Callable[[Any], Any]) -> Any:
    """Applies `change` to each value of `tree` that holds a batch of `size`. Other values stay.

    A value that holds a batch is a tensor whose first dimension is B, or a list or tuple of B items of any type. In
    dicts and other lists and tuples, such as (logits_BK, embedding_BE), each value is changed separately. A tuple of B
    tensors that all have B rows is treated as several outputs.
    """
    if has_rows(tree, size):
        return change(tree)
    if isinstance(tree, list | tuple):
        if len(tree) == size and not (isinstance(tree, tuple) and all(has_rows(value, size) for value in tree)):
            return change(tree)
        values = [by_sample(value, size, change) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)  # a named tuple
    if isinstance(tree, Mapping):
        result: Any = copy.copy(tree)
        for key, value in tree.items():
            result[key] = by_sample(value, size, change)
        return result
    return tree


def has_rows(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == size


def sample_at(batch: Mapping[str, Any], index: int, size: int) -> dict[str, Any]:
    """One sample of a batch of `size`, as stored. Its inputs may be in dicts and lists."""
    sample: dict[str, Any] = by_sample(batch, size, lambda value: value[index])
    return sample


def samples_at(batch: Mapping[str, Any], indices: slice | list[int] | Tensor, size: int) -> dict[str, Any]:
    """The samples at `indices` of a batch of `size`. Values without an entry per sample do not change."""

    def select(value: Any) -> Any:
        if isinstance(value, Tensor) or isinstance(indices, slice):
            return value[indices]
        return type(value)([value[index] for index in (indices.tolist() if isinstance(indices, Tensor) else indices)])

    selected: dict[str, Any] = by_sample(batch, size, select)
    return selected


def float32(tree: Any) -> Any:
    """Converts half precision to float32, so metrics are exact whatever precision the network used."""

    def to_float32(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor

    return apply_to_collection(tree, Tensor, to_float32)


# --- The loss of samples that augmentation has mixed with a partner (kit/augment/transforms.py) ---


def partner_batch(batch: Batch) -> Batch:
    """The batch with everything except `input` taken from each sample's partner."""
    rest = {name: value for name, value in batch.items() if name != "input"}
    return {**batch, **samples_at(rest, batch["partner"], len(batch["partner"]))}


def one_per_sample(value_B: Any, task: Any, batch: Batch, method: str = "loss") -> Tensor:
    """Raises UserError if a task's loss or weight is not one number per sample."""
    count = len(batch["index"])
    own_B = task.own_rows(value_B) if isinstance(value_B, Tensor) and value_B.dim() == 1 else value_B
    if isinstance(own_B, Tensor) and own_B.shape == (count,):
        return own_B
    description = f"shape {tuple(own_B.shape)}" if isinstance(own_B, Tensor) else f"type {type(own_B).__name__}"
    raise UserError(
        f"task={type(task).__name__}: `{method}` returns {description} for {count} samples; expected one number per sample, shape ({count},). Compute a "
        "loss with reduction='none', then average the elements of each sample: loss.flatten(1).mean(1). Weights may be None."
    )


def sample_weights(task: Any, batch: Batch) -> Tensor | None:
    """weight_B, if samples differ in weight. Rejects (B, 1): it would broadcast to (B, B) and average the weights."""
    weight_B = task.weight(batch)
    return None if weight_B is None else one_per_sample(weight_B, task, batch, "weight")


def weighted_loss(task: Any, output: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """loss_B times weight_B, and weight_B. A mixed sample has both targets, each with its share.

    Exact for losses that are linear in the target, such as cross-entropy with label smoothing. For other losses, this
    is the definition of mixup.
    """
    loss_B, weight_B = one_per_sample(task.loss(output, batch), task, batch), sample_weights(task, batch)
    loss_B = loss_B if weight_B is None else loss_B * weight_B
    if "share" not in batch:
        return loss_B, weight_B
    share_B, partners = batch["share"], partner_batch(batch)
    other_loss_B = one_per_sample(task.loss(output, partners), task, batch)
    other_weight_B = sample_weights(task, partners)
    if weight_B is None or other_weight_B is None:
        return share_B * loss_B + (1 - share_B) * other_loss_B, None
    loss_B = share_B * loss_B + (1 - share_B) * other_loss_B * other_weight_B
    return loss_B, share_B * weight_B + (1 - share_B) * other_weight_B


# --- Losses between samples: each process computes with the rows of all of them ---


class SumOverProcesses(torch.autograd.Function):
    """An all-reduce with a gradient: the gradient of each process's addend is the sum of all processes' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)  # autograd may pass a gradient to others
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return SumOverProcesses.apply(grads[0])


def gather_rows(x_B: Tensor, rank: int, world: int) -> tuple[Tensor, slice]:
    """The rows of all processes, and which of them are this process's. Raises UserError if their shapes differ.

    The strategy averages gradients over processes, so a process may compute the loss of its own samples, or of all.
    """
    shape = torch.tensor([*x_B.shape, *[-1] * (8 - x_B.dim())], device=x_B.device)  # at most 8 dimensions
    every = shape.new_empty(world, 8)
    torch.distributed.all_gather([*every], shape)
    shapes = [tuple(size for size in each if size >= 0) for each in every.tolist()]
    if len({shape[1:] for shape in shapes}) > 1:
        given = f"self.gather got tensors of the shapes {', '.join(map(str, shapes))} in the processes"
        raise UserError(f"{given}. Pad the samples to one shape in `__getitem__`, or train in one process.")
    sizes = [shape[0] for shape in shapes]
    begin, end = sum(sizes[:rank]), sum(sizes[: rank + 1])
    before, after = (x_B.new_zeros(count, *x_B.shape[1:]) for count in (begin, sum(sizes) - end))
    return SumOverProcesses.apply(torch.cat([before, x_B, after])), slice(begin, end)  # type: ignore[no-untyped-call]


# --- The targets of a task, and checks of what a user's class returns or overrides ---

Plain = str | int | float
RESERVED = ("index", "path", "row", "error")  # columns of a table of predictions that identify a row's sample


def validated_columns(columns: Mapping[str, Any], *, targets: bool = False) -> dict[str, Any]:
    """Raises UserError if predictions have a column that Lockstep writes; with `targets`, they may have targets."""
    if reserved := [name for name in columns if name in RESERVED or (name.startswith("target/") and not targets)]:
        raise UserError(
            f"the predictions have a column {reserved[0]}, a name that Lockstep uses in tables of predictions. Reserved names: {', '.join(RESERVED)} and target/... Rename the column."
        )
    return dict(columns)


def is_small(column: Any, count: int) -> bool:
    """Whether a column has a string, a number, or up to eight numbers for each of `count` samples."""
    if isinstance(column, Tensor):
        return column.dim() > 0 and len(column) == count and column[:1].numel() <= 8
    return isinstance(column, list | tuple) and len(column) == count and all(isinstance(x, Plain) for x in column)
