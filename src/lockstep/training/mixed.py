"""The loss of samples that augmentation has mixed with their partners (augment/mixing.py)."""

# B batch

from typing import Any

from torch import Tensor

from lockstep.data.dataset import Batch
from lockstep.errors import UserError
from lockstep.tasks import Task
from lockstep.training.trees import samples_at


def of_partners(batch: Batch) -> Batch:
    """The batch with everything but `input` taken from each sample's partner."""
    rest = {name: value for name, value in batch.items() if name != "input"}
    return {**batch, **samples_at(rest, batch["partner"], len(batch["partner"]))}


def one_per_sample(loss_B: Any, task: Task, batch: Batch) -> Tensor:
    """Raises UserError if a task's loss is not one number per sample."""
    count = len(batch["index"])
    if isinstance(loss_B, Tensor) and loss_B.shape == (count,):
        return loss_B
    given = f"shape {tuple(loss_B.shape)}" if isinstance(loss_B, Tensor) else f"type {type(loss_B).__name__}"
    raise UserError(
        f"task={type(task).__name__}: `loss` returns {given} for {count} samples; expected one number per sample, shape ({count},). "
        "Compute it with reduction='none', then average each sample's own elements: loss.flatten(1).mean(1)."
    )


def weighted_loss(task: Task, output: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """loss_B times weight_B, and weight_B. A mixed sample has both targets, each with its share.

    Exact for losses that are linear in the target, such as cross-entropy with label smoothing; the definition of mixup for others.
    """
    loss_B, weight_B = one_per_sample(task.loss(output, batch), task, batch), task.weight(batch)
    loss_B = loss_B if weight_B is None else loss_B * weight_B
    if "share" not in batch:
        return loss_B, weight_B
    share_B, partners = batch["share"], of_partners(batch)
    other_B, of_other_B = one_per_sample(task.loss(output, partners), task, batch), task.weight(partners)
    if weight_B is None or of_other_B is None:
        return share_B * loss_B + (1 - share_B) * other_B, None
    loss_B = share_B * loss_B + (1 - share_B) * other_B * of_other_B
    return loss_B, share_B * weight_B + (1 - share_B) * of_other_B
