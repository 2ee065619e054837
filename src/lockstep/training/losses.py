"""The samples of a batch and of a network's output, their targets, and their losses: by sample, mixed, or between all samples of a global batch."""

# B batch, fillers included

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.dataset import Batch
from lockstep.data.sampler import FILLER
from lockstep.errors import UserError
from lockstep.machine.world import objects_of_all

if TYPE_CHECKING:
    from lockstep.training.task import Task

Tree = Any
Change = Callable[[Any, str], Any]  # of a value, and the name of its place

# --- The samples of a batch or of an output: a tensor, or dicts, lists and tuples of tensors ---


def by_sample(tree: Tree, size: int, samples: Change, other: Change, name: str) -> Tree:
    """`tree` with `samples` of each value that has a batch of `size`, and `other` of what is no container.

    Such a value is a tensor whose first dimension is B, or a list or tuple of B items, whatever these are. Dicts and
    other lists and tuples, such as (logits_BK, embedding_BE), are changed by value. A tuple of B tensors that all have B rows holds
    several outputs.
    """

    def changed(value: Any, place: str) -> Any:
        return by_sample(value, size, samples, other, f"{name}{place}")

    if has_rows(tree, size):
        return samples(tree, name)
    if isinstance(tree, list | tuple):
        if len(tree) == size and not (isinstance(tree, tuple) and all(has_rows(value, size) for value in tree)):
            return samples(tree, name)
        values = [changed(value, f"[{place}]") for place, value in enumerate(tree)]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)  # a named tuple
    if isinstance(tree, Mapping):
        new: Any = copy.copy(tree)
        for key, value in tree.items():
            new[key] = changed(value, f"[{key!r}]")
        return new
    return other(tree, name)


def has_rows(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == size


def first_rows(output: Tree, count: int, size: int) -> Tree:
    """The first `count` samples of a network's output for a batch of `size`.

    Raises:
        UserError: a tensor without B rows, a value that is neither a tensor nor None, or a list that may hold samples or outputs.
    """

    def cut(value: Any, name: str) -> Any:
        # a tensor for each sample, or B outputs, such as levels of features
        if 0 < count < size and isinstance(value, list) and all(has_rows(item, size) for item in value):
            raise UserError(
                f"the network returns {name}, a list of {size} tensors with {size} rows each, for a batch of {size}: it holds a tensor for each "
                f"sample, or {size} outputs. Return a tuple of several outputs, or a dict for each sample."
            )
        return value[:count]

    def refused(value: Any, name: str) -> None:
        if value is not None:
            given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            raise UserError(
                f"the network returns {name} of {given} for a batch of {size}. The first dimension of every tensor must be the sample, {size} here, "
                "and a list must have an item per sample, so fillers can be removed. Return something else, or choose what to return in the "
                "task's `outputs`."
            )

    return by_sample(output, size, cut, refused, "output")


def sample_at(batch: Mapping[str, Any], place: int, size: int) -> dict[str, Any]:
    """One sample of a batch of `size`, as it is stored. Its inputs may be in dicts and lists."""
    stored = {name: value for name, value in batch.items() if name != "count"}
    sample: dict[str, Any] = by_sample(stored, size, lambda value, _: value[place], lambda value, _: value, "batch")
    return sample


def samples_at(batch: Mapping[str, Any], places: slice | list[int] | Tensor, size: int) -> dict[str, Any]:
    """The samples at `places` of a batch of `size`. Values without an entry per sample stay as they are."""

    def taken(value: Any, _: str) -> Any:
        if isinstance(value, Tensor) or isinstance(places, slice):
            return value[places]
        return type(value)([value[place] for place in (places.tolist() if isinstance(places, Tensor) else places)])

    taken_batch: dict[str, Any] = by_sample(batch, size, taken, lambda value, _: value, "batch")
    return taken_batch


def without_fillers(output: Tree, batch: Mapping[str, Any]) -> tuple[Tree, dict[str, Any]]:
    """A network's output in float32 and its batch, of the samples that count."""
    count, size = batch["count"], len(batch["index"])
    return float32(first_rows(output, count, size)), samples_at(batch, slice(count), size)


def float32(tree: Any) -> Any:
    """Half precision converted to float32, so metrics are exact whatever precision the network used."""

    def full(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor

    return apply_to_collection(tree, Tensor, full)


# --- The loss of samples that augmentation has mixed with their partners (augment/mixing.py) ---


def of_partners(batch: Batch) -> Batch:
    """The batch with everything but `input` taken from each sample's partner."""
    rest = {name: value for name, value in batch.items() if name != "input"}
    return {**batch, **samples_at(rest, batch["partner"], len(batch["partner"]))}


def one_per_sample(value_B: Any, task: "Task", batch: Batch, method: str = "loss") -> Tensor:
    """Raises UserError if a task's loss or weight is not one number per sample."""
    count = len(batch["index"])
    if isinstance(value_B, Tensor) and value_B.shape == (count,):
        return value_B
    given = f"shape {tuple(value_B.shape)}" if isinstance(value_B, Tensor) else f"type {type(value_B).__name__}"
    advice = "Compute it with reduction='none', then average each sample's own elements: loss.flatten(1).mean(1)."
    raise UserError(
        f"task={type(task).__name__}: `{method}` returns {given} for {count} samples; expected one number per sample, shape ({count},). "
        f"{advice if method == 'loss' else 'Return None if all samples count alike.'}"
    )


def weight_of(task: "Task", batch: Batch) -> Tensor | None:
    """weight_B, if samples differ in weight. A (B, 1) would be broadcast to (B, B), where each loss has the mean weight."""
    weight_B = task.weight(batch)
    return None if weight_B is None else one_per_sample(weight_B, task, batch, "weight")


def weighted_loss(task: "Task", output: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """loss_B times weight_B, and weight_B. A mixed sample has both targets, each with its share.

    Exact for losses that are linear in the target, such as cross-entropy with label smoothing; the definition of mixup for others.
    """
    loss_B, weight_B = one_per_sample(task.loss(output, batch), task, batch), weight_of(task, batch)
    loss_B = loss_B if weight_B is None else loss_B * weight_B
    if "share" not in batch:
        return loss_B, weight_B
    share_B, partners = batch["share"], of_partners(batch)
    other_B, of_other_B = one_per_sample(task.loss(output, partners), task, batch), weight_of(task, partners)
    if weight_B is None or of_other_B is None:
        return share_B * loss_B + (1 - share_B) * other_B, None
    loss_B = share_B * loss_B + (1 - share_B) * other_B * of_other_B
    return loss_B, share_B * weight_B + (1 - share_B) * of_other_B


# --- Losses between samples (`Task.between_samples`): every process computes the loss of the whole global batch ---
#
# Outputs and batches are gathered in the order of the global batch. Each process then has the whole loss, so its gradient with
# respect to its own outputs is complete: backward communicates nothing more.


def whole_batch(task: "Task", output: Any, batch: Batch) -> tuple[Any, Batch]:
    """For a task with `between_samples`, the outputs, with gradients, and the batch of all processes; for others its arguments."""
    trainer = task.trainer
    if not task.between_samples or trainer.world_size == 1:
        return output, batch
    rank, world, size_B = trainer.global_rank, trainer.world_size, len(batch["index"])

    def gather(tensor: Tensor) -> Tensor:
        sent = tensor.detach().contiguous()
        parts_N = [torch.empty_like(sent) for _ in range(world)]
        torch.distributed.all_gather(parts_N, sent)
        if tensor.requires_grad:
            parts_N[rank] = own = tensor.view_as(tensor)
            own.register_hook(lambda gradient: gradient * world)  # the strategy averages gradients over processes
        return torch.cat(parts_N)

    def of_batch(value: Any, _: str) -> Any:
        if isinstance(value, Tensor):
            return gather(value)
        every = objects_of_all(move_data_to_device(value, "cpu"))  # a tensor would arrive on the sender's GPU
        return move_data_to_device([item for part in every for item in part], batch["index"].device)

    def refused(value: Any, name: str) -> Any:
        if not isinstance(value, Tensor | list | tuple):
            return value
        form = f"the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{len(value)} items"
        raise UserError(
            f"{type(task).__name__}.between_samples gathers tensors with a row per sample, but {name} has {form} in a batch "
            f"of {size_B}. Return tensors of {size_B} rows from `outputs`, several in a tuple; expand what all samples share."
        )

    batch = dict(batch)
    if "partner" in batch:  # a place in the micro-batch
        batch["partner"] = batch["partner"] + rank * size_B
    gathered: Batch = by_sample(batch, size_B, of_batch, refused, "batch")
    gathered_output = by_sample(
        output, size_B, lambda x, name: gather(x) if isinstance(x, Tensor) else refused(x, name), refused, "output"
    )
    return gathered_output, {**gathered, "count": size_B * world}


def evaluation_loss(task: "Task", output: Any, batch: Batch) -> Tensor | None:
    """loss_B of this process's real samples, among those of all processes; None if the task compares no samples, or one process has
    them all. Every process must call it, also one without samples."""
    if not task.between_samples or task.trainer.world_size == 1:
        return None
    output, gathered = whole_batch(task, float32(output), batch)
    count = int((gathered["index"] != FILLER).sum())  # the fillers are last
    output = apply_to_collection(output, Tensor, lambda tensor: tensor[:count])
    named = {**samples_at(gathered, slice(count), gathered["count"]), "count": count}
    first = task.trainer.global_rank * len(batch["index"])
    return one_per_sample(task.loss(output, named), task, named)[first : first + batch["count"]]


# --- What a task takes as targets, and the checks of what a class of the user's returns or overrides ---

Plain = str | int | float
RESERVED = ("index", "path", "row", "error")  # columns of a table of predictions that say what a row is about
AT_ONCE = 2**22  # numbers that are judged together


@dataclass(frozen=True)
class Targets:
    """What a task takes as targets. Whole numbers are from `least` on and stand for names, unless `most` is given."""

    what: str  # in words, of one sample
    dims: int | None  # of one sample's; None: any
    whole: bool = True
    least: float = 0
    most: float | None = None
    ignored: int | None = None  # a number that does not count
    hint: str = ""

    def wrong(self, target_N: NDArray[Any], names: int) -> tuple[int, str] | None:
        """The place of the first sample whose target is something else, and what it is."""
        most = names - 1 if self.most is None else self.most
        limits = (f" from 0 to {most}" if self.whole else "") + ("" if self.ignored is None else f", or {self.ignored}")
        expected = f"expected {self.what}{limits}. Correct it, or remove the sample{self.hint}; for other targets, set task=<another one>."
        if self.dims not in (None, target_N.ndim - 1) or target_N.dtype.kind not in "biuf":
            return 0, f"{target_N.dtype} of shape {target_N.shape[1:]}; {expected}"
        rows = max(1, AT_ONCE * len(target_N) // max(1, target_N.size))  # masks may fill the memory
        for first in range(0, len(target_N), rows):
            block = target_N[first : first + rows]
            odd = ~(np.isfinite(block) & (block >= self.least) & (block <= most) | (block == self.ignored))
            if self.whole and block.dtype.kind == "f":
                odd |= block != np.trunc(block)
            if odd.any():
                return first + int(np.argwhere(odd)[0, 0]), f"{block[odd][0]}; {expected}"
        return None


def validated_columns(columns: Mapping[str, Any], *, targets: bool = False) -> dict[str, Any]:
    """Raises UserError if predictions have a column that Lockstep writes itself; with `targets`, they may be among them."""
    taken = [name for name in columns if name in RESERVED or name.startswith("target/")]
    if taken := [name for name in taken if not targets or name.partition("/")[0] != "target"]:
        raise UserError(
            f"the predictions have a column {taken[0]}, which Lockstep's tables of predictions have themselves. Reserved are "
            f"{', '.join(RESERVED)} and target/... Rename the column."
        )
    return dict(columns)


def is_small(column: Any, count: int) -> bool:
    """Whether a column has a text, a number, or up to eight numbers for each of `count` samples."""
    if isinstance(column, Tensor):
        return column.dim() > 0 and len(column) == count and column[:1].numel() <= 8
    return isinstance(column, list | tuple) and len(column) == count and all(isinstance(x, Plain) for x in column)


def validate_outputs(output: Tensor, *shape: int) -> None:
    """Raises UserError if a network's output has a different shape."""
    if output.shape != shape:
        raise UserError(
            f"the network gives {tuple(output.shape)}, but the task and the data need {shape}. Choose a different model, or give "
            "it the number of outputs that the data needs."
        )


def loss_factors(task: "Task", name: str, factors: Sequence[float] | None) -> Tensor | None:
    """The factors of a loss. Raises UserError if they are not one for each class or label."""
    if factors is None:
        return None
    if len(factors) != len(task.value_names):
        raise UserError(
            f"task.{name} has {len(factors)} numbers; the data has {len(task.value_names)} {task.names}. Give one for each."
        )
    return torch.tensor(factors, dtype=torch.float32)


# what a step of a task calls, which keeps the promises
STEP_PARTS = {"training_step": ("mean_loss", "mean"), "validation_step": ("measure",), "test_step": ("measure",)}


def without_super(kind: type["Task"], base: type["Task"]) -> str:
    """The first method of LightningModule that a task's class has in place of Task's own, without calling that, or what its step calls;
    empty if there is none."""
    shared = {name for name in vars(base) if hasattr(pl.LightningModule, name) and not name.startswith("__")}
    for each in kind.__mro__[: kind.__mro__.index(base)]:
        for name in sorted(shared & vars(each).keys()):
            code = getattr(inspect.unwrap(vars(each)[name]), "__code__", None)
            if code and not {"super", *STEP_PARTS.get(name, ())} & {*code.co_names}:
                return name
    return ""
