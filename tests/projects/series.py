"""Forecasts of the next hours of several sensors from the last ones."""

# B window · T hour · C sensor
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import Arrays, DataSet
from lockstep.kit.tasks import Regression

PAST, FUTURE = 12, 4


class Windows(DataSet):
    unit = "windows"

    def __init__(self, *, hours: int = 160, sensors: int = 3) -> None:
        draw, time_T1 = torch.Generator().manual_seed(0), torch.arange(hours)[:, None]
        scale_C = torch.tensor([1.0, 20.0, 300.0])[:sensors]
        series_TC = scale_C * (torch.sin(time_T1 / torch.arange(3, 3 + sensors)) + 5)
        series_TC += 0.1 * scale_C * torch.randn(hours, sensors, generator=draw)
        end = hours * 4 // 5
        mean_C, std_C = series_TC[:end].mean(0), series_TC[:end].std(0)
        parts = [((part - mean_C) / std_C).unfold(0, PAST + FUTURE, 1) for part in (series_TC[:end], series_TC[end:])]
        self.train, self.test = (
            Arrays(input=x[..., :PAST].flatten(1).numpy(), target=x[..., PAST:].flatten(1).numpy()) for x in parts
        )
        names = [f"sensor {c} +{t}" for c in range(sensors) for t in range(1, FUTURE + 1)]
        self.metadata = {"targets": names, "std": std_C.repeat_interleave(FUTURE).tolist()}

    def model_kwargs(self) -> dict[str, Any]:
        return {"in_features": self.train.arrays["input"].shape[1]}


class Mlp(nn.Sequential):
    def __init__(self, *, in_features: int, num_classes: int, width: int = 16) -> None:
        super().__init__(nn.Linear(in_features, width), nn.Tanh(), nn.Linear(width, num_classes))


class Forecast(Regression):
    """Its loss is of standardised values, its MAE in the sensors' units."""

    def inputs_by_metric(self, output: Tensor, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
        std = output.new_tensor(self.metadata["std"])
        return {"mae": (output * std, batch["target"] * std)}
