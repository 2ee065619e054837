"""The objects of train.py, for tests: made of settings, in this process."""

from typing import Any

import lightning.pytorch as pl

from lockstep import build, launch
from lockstep.config.settings import Settings
from lockstep.training.workload import Workload


def batches(settings: Settings) -> Any:
    """The datamodule, of prepared data."""
    data = launch.job("train").read_data(settings)
    if data is not None:
        data.prepare()
    return build.datamodule(settings, data)


def module(settings: Settings, data: Any) -> pl.LightningModule:
    made = build.module(settings, data)
    return build.attach(settings, data, made, build.network(settings, data, made))


def workload(settings: Settings, data: Any) -> Workload:
    return build.workload(settings, module(settings, data), data)
