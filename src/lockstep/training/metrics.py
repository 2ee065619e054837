"""Evaluation figures from sums over samples, never from means of means, so they do not depend on the world size."""

# B batch

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lockstep.errors import UserError
from lockstep.tasks.panel import EXACT
from lockstep.training.tree_sums import tree_sum


class MeanLoss(Metric):
    """The weighted mean of per-sample losses, and the number of samples.

    With `shards`, each logical rank has a sum of its own, and these are added in one fixed tree.
    """

    full_state_update = False
    loss_sum: Tensor
    weight_sum: Tensor
    count: Tensor

    def __init__(self, shards: int = 1) -> None:
        super().__init__()
        self.exact = EXACT  # the order of 10,000 float32 additions changes the sixth digit
        self.add_state("loss_sum", torch.zeros(shards, dtype=self.exact), dist_reduce_fx="sum")
        self.add_state("weight_sum", torch.zeros(shards, dtype=self.exact), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss_B: Tensor, weight_B: Tensor | None, logical_rank: int = 0) -> None:
        weighted_B = loss_B if weight_B is None else loss_B * weight_B
        self.loss_sum[logical_rank] += weighted_B.sum(dtype=self.loss_sum.dtype)
        self.weight_sum[logical_rank] += len(loss_B) if weight_B is None else weight_B.sum(dtype=self.weight_sum.dtype)
        self.count += len(loss_B)

    def compute(self) -> dict[str, Tensor]:
        loss = tree_sum(self.loss_sum) / tree_sum(self.weight_sum)
        return {"loss": loss.float(), "count": self.count.to(self.exact)}


def named(name: str, value: Any, names: Sequence[Any]) -> dict[str, Tensor]:
    """The figures of a metric: one number, one for each entry of a dict, or one for each value of a tensor, such as one per class.

    Values are named by `names`, or numbered if there are more or fewer.
    """
    if isinstance(value, Mapping):
        return {figure: v for key, each in value.items() for figure, v in named(f"{name}/{key}", each, names).items()}
    if not isinstance(value, Tensor | int | float):
        raise UserError(
            f"the metric {name} computes a {type(value).__name__}, which cannot be logged; expected a number, a tensor, or a dict of these. "
            "Name a different metric, or subclass it with a `compute` that returns one of these."
        )
    values = torch.as_tensor(value).float().flatten()
    if len(values) == 1:
        return {name: values[0]}
    labels = names if len(names) == len(values) else range(len(values))
    return {f"{name}/{label}": value for label, value in zip(labels, values, strict=True)}


def names_without_samples(name: str, metric: Metric, names: Sequence[Any]) -> list[str]:
    """The figures of a metric; `name` and `name/*` if it cannot compute on no samples."""
    blank: Any = copy.deepcopy(metric)
    blank.distributed_available_fn = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchmetrics warns that it has seen no sample
            return list(named(name, blank.compute(), names))
    except Exception:
        return [name, f"{name}/*"]
