"""Regression: one or several numbers per sample."""

# B batch · N sample · T target

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

from lockstep.kit.panels import Bars, Content, Inputs, Kept, Panel, Points
from lockstep.kit.task import Targets, Task

SAMPLES = 1000  # points in a scatter plot
TARGETS = 6  # targets that are plotted


class Regression(Task):
    """Takes output_BT and target_BT, or target_B for a single target. `huber_delta`: larger errors count linearly."""

    needs = ("targets",)
    names = "targets"
    target_spec = Targets("finite numbers", dims=None, integer=False, minimum=-math.inf, maximum=math.inf)
    activation = "identity"
    float32_head = True  # near 1,500, bf16 only has multiples of 8

    def __init__(self, *, loss: Literal["mse", "mae", "huber"] = "mse", huber_delta: float = 1.0, **given: Any) -> None:
        super().__init__(**given)
        self.error: Any = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": partial(F.huber_loss, delta=huber_delta)}[loss]

    def loss(self, output: Tensor, batch: Mapping[str, Any]) -> Tensor:
        return columns_of(self.error(*self.metric_inputs(output, batch), reduction="none")).mean(1)

    def metrics(self) -> dict[str, Metric]:
        return {"rmse": MeanSquaredError(squared=False), "mae": MeanAbsoluteError(), "r2": R2(len(self.value_names))}

    def metric_arguments(self) -> dict[str, Any]:
        return {"num_outputs": len(self.value_names)}

    def metric_inputs(self, output: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Output and target in the target's shape, so nothing is broadcast, and in at least single precision."""
        dtype = torch.promote_types(output.dtype, torch.float32)
        return output.reshape(batch["target"].shape).to(dtype), batch["target"].to(dtype)

    def predictions(self, output: Tensor) -> dict[str, Sequence[Any] | Tensor]:
        return dict(zip(self.value_names, output.float().flatten(1).unbind(1), strict=True))

    def targets(self, batch: Mapping[str, Any]) -> dict[str, Sequence[Any] | Tensor]:
        columns = zip(self.value_names, columns_of(batch["target"].float()).unbind(1), strict=True)
        return {f"target/{name}": column for name, column in columns}

    def curves(self) -> list[tuple[str, str, tuple[str, ...]]]:
        return [
            ("Loss", "loss", ("train/loss", "val/loss")),
            ("Error", "in units of the targets", ("val/rmse", "val/mae")),
            ("R²", "explained fraction of the variance", ("val/r2",)),
        ]

    def test_panels(self) -> dict[str, Panel]:
        return {"residuals": Residuals(self.value_names, self.metric_inputs)}

    def describe(self, output: Tensor, batch: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        guess, target = map(columns_of, self.metric_inputs(output, batch))
        names = self.value_names[:4]
        return [
            {name: f"{t:.4g} predicted as {g:.4g}" for name, t, g in zip(names, row_t, row_g, strict=False)}
            for row_t, row_g in zip(target.tolist(), guess.tolist(), strict=True)
        ]


def columns_of(x: Tensor) -> Tensor:
    """x_BT, also for a single target."""
    return x.flatten(1) if x.dim() > 1 else x[:, None]


class R2(Metric):
    """The coefficient of determination, averaged over targets. A constant target scores 1 if predicted exactly, else 0.

    torchmetrics' R2Score (1.9) returns 1 if the squared errors sum to less than 1e-4, and fails on one sample.
    """

    full_state_update = False
    plot_upper_bound = 1.0
    count: Tensor
    sum_T: Tensor
    squares_T: Tensor
    errors_T: Tensor

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")
        for name in ("sum_T", "squares_T", "errors_T"):
            self.add_state(name, torch.zeros(num_outputs), dist_reduce_fx="sum")

    def update(self, output: Tensor, target: Tensor) -> None:
        output_BT, target_BT = (x.reshape(len(x), -1).to(self.sum_T.dtype) for x in (output, target))
        self.count += len(target_BT)
        self.sum_T += target_BT.sum(0)
        self.squares_T += target_BT.square().sum(0)
        self.errors_T += (output_BT - target_BT).square().sum(0)

    def compute(self) -> Tensor:
        deviations_T = self.squares_T - self.sum_T.square() / self.count
        constant = (self.errors_T == 0).to(self.errors_T.dtype).where(self.errors_T.isfinite(), torch.nan)
        return torch.where(deviations_T <= 0, constant, 1 - self.errors_T / deviations_T).mean()


class Residuals(Kept):
    """The targets and predictions of a fixed random subset."""

    count: Tensor

    def __init__(self, names: Sequence[str], inputs: Inputs) -> None:
        super().__init__(SAMPLES, 2, len(names))
        self.inputs = inputs
        self.names = [str(name) for name in names]
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def value(self, output: Any, batch: Mapping[str, Any], loss_B: Tensor) -> Tensor:
        output, target = self.inputs(output, batch)
        return torch.stack([x.reshape(len(batch["index"]), -1).float() for x in (target, output)], 1)

    def update(self, output: Any, batch: Mapping[str, Any], loss_B: Tensor) -> None:
        super().update(output, batch, loss_B)
        self.count += len(batch["index"])

    def contents(self) -> Sequence[Content]:
        pairs = [value for _, value in self.found()]
        pairs_N2T = torch.stack(pairs) if pairs else self.value_N[:0]
        note = "" if self.count <= SAMPLES else f"A fixed random sample of {SAMPLES:,} out of {self.count:,}."
        return [item for index in range(min(TARGETS, len(self.names))) for item in self.of(index, pairs_N2T, note)]

    def of(self, index: int, pairs_N2T: Tensor, note: str) -> Iterator[Content]:
        name, pairs = self.names[index], pairs_N2T[:, :, index].double().cpu()
        points = [(target, guess) for target, guess in pairs.tolist()]
        yield Points(f"Predictions of {name}", "target", "prediction", points, diagonal=True, note=note)
        residual_N = pairs[:, 1] - pairs[:, 0]
        residual_N = residual_N[residual_N.isfinite()]
        if len(residual_N) > 1:
            low, high = residual_N.min().item(), residual_N.max().item()
            counts, edges = torch.histogram(residual_N, 25, range=(low, high if high > low else low + 1))
            axis_title = "prediction - target"
            yield Bars(f"Residuals of {name}", axis_title, "samples", edges.tolist(), counts.tolist(), note)
