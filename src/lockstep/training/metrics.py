"""The metrics of an evaluation: from sums over samples, not from means of means, so they do not depend on the world size."""

# B batch

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lockstep.compat.metric_states import exact_on, of_all_processes, prepare, update
from lockstep.errors import UserError
from lockstep.training.module import Sums, add_to_sums, log_reduced, sum_over_processes


def named_values(name: str, value: Any, names: Sequence[Any]) -> dict[str, Tensor]:
    """The values of a metric, by name: from a number, a dict, or a tensor with several values, such as one per class.

    Values of a tensor are named by `names`, or numbered if the counts differ.
    """
    if isinstance(value, Mapping):
        entries = [named_values(f"{name}/{key}", entry, names) for key, entry in value.items()]
        return {metric: v for entry in entries for metric, v in entry.items()}
    if not isinstance(value, Tensor | int | float):
        raise UserError(
            f"the metric {name} returns a {type(value).__name__}, which cannot be logged; expected a number, a tensor, or a dict of these."
        )
    values = torch.as_tensor(value).float().flatten()
    if len(values) == 1:
        return {name: values[0]}
    labels = names if len(names) == len(values) else range(len(values))
    return {f"{name}/{label}": value for label, value in zip(labels, values, strict=True)}


NOTHING: Sums = {"loss": (0.0, 0.0), "count": (0.0, 0.0)}


class Measured(NamedTuple):
    """The mean loss and the metrics of an evaluation set, of the samples of all processes."""

    sums: Sums  # of the loss, and of the number of samples
    metrics: Mapping[str, Metric]

    @classmethod
    def of(cls, module: pl.LightningModule, metrics: Mapping[str, Metric]) -> Self:
        """They are no children of `module`, and need not be."""
        for metric in metrics.values():
            prepare(metric, module.device)  # sums exactly
        return cls({**NOTHING}, metrics)

    def update(
        self,
        module: Any,
        batch_idx: int,
        loss_B: Tensor,
        weight_B: Tensor | None,
        inputs: Mapping[str, tuple[Any, ...]],
    ) -> None:
        """Adds a batch. `inputs`: the arguments of each metric."""
        exact = exact_on(module.device)
        weight = len(loss_B) if weight_B is None else weight_B.sum(dtype=exact)
        weighted_B = loss_B if weight_B is None else loss_B * weight_B
        add_to_sums(self.sums, "loss", weighted_B.sum(dtype=exact), weight)
        add_to_sums(self.sums, "count", len(loss_B), 0)
        for name, metric in self.metrics.items():
            update(metric, batch_idx, *inputs[name])

    def log(self, module: pl.LightningModule, part: str, names: Sequence[Any]) -> None:
        """Logs the values of all processes as `part`/..., and begins anew. `names`: of the values of a metric with several."""
        totals = sum_over_processes(self.sums)
        loss, weight = totals["loss"]
        values = {"loss": torch.tensor(loss / weight if weight else torch.nan)}
        values["count"] = torch.tensor(totals["count"][0], dtype=torch.float64)
        self.sums.update(NOTHING)
        with of_all_processes([*self.metrics.values()]):
            for name, metric in self.metrics.items():
                values |= named_values(name, metric.compute(), names)
        log_reduced(module, {f"{part}/{name}": value for name, value in values.items()})
        for metric in self.metrics.values():
            metric.reset()
