"""The objects of train.py, for tests: made of settings, in this process."""

from typing import Any

import lightning.pytorch as pl
import pytest
from torch import nn

from lockstep import build, launch
from lockstep.config.settings import Settings
from lockstep.kit.task import Task


def batches(settings: Settings) -> Any:
    """The datamodule, of prepared data."""
    data = launch.job("train").read_data(settings)
    if data is not None:
        data.prepare()
    return build.datamodule(settings, data)


def module(settings: Settings, data: Any) -> pl.LightningModule:
    return build.module(settings, data)


def task(
    kind: type[Task], net: nn.Module | None = None, *, metrics: Any = None, keys: Any = None, **metadata: Any
) -> Any:
    """A task without a run, ready to be evaluated. `keys`: further arguments of its class."""
    never = dict.fromkeys(("optimizer", "scheduler"), pytest.fail)
    return kind(net=net or nn.Identity(), metadata=metadata, metrics=metrics, **never, **(keys or {}))
