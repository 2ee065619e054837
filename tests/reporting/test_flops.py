"""Operations are counted as the shapes say, and nothing is computed for it."""

import logging

import numpy as np
import pytest
from torch import nn

from lockstep.data import Arrays, Images
from lockstep.data.datamodule import DataModule
from lockstep.reporting.flops import flops_per_s, flops_per_sample
from lockstep.tasks import Classification
from lockstep.training.module import TaskModule

BASIC_NET = {"_target_": "lockstep.models.BasicNet"}


class Black(Images):
    """Four black images."""

    classes = tuple("0123456789")

    def __init__(self, channels: int, image_size: int) -> None:
        super().__init__(image_size=image_size, mean=[0.5] * channels, std=[0.5] * channels)
        self.train = self.test = Arrays(input=np.zeros((4, channels, 28, 28), np.uint8), target=np.zeros(4, np.int64))


def of_a_run(channels: int, image_size: int) -> tuple[TaskModule, DataModule]:
    data, task, never = Black(channels, image_size), Classification(), pytest.fail
    task.bind(data.about)
    offered = data.network_arguments() | task.network_arguments()
    module = TaskModule(
        nn.Identity(), task, optimizer=never, schedule=never, parallelize=never, metrics={}, network_arguments=offered
    )
    return module, DataModule(data, batch_size=2, eval_batch_size=2)


def test_basic_nets_operations_are_those_of_its_shapes():
    module, data = of_a_run(1, 28)
    first = 26 * 26 * 32 * 9  # multiplications and additions
    second = 24 * 24 * 64 * 32 * 9
    linear = 9216 * 128 + 128 * 10
    forward = first + second + linear
    backward = first + 2 * (second + linear)  # no gradient of the images
    assert flops_per_sample(module, BASIC_NET, data) == 2 * (forward + backward)


def test_resnet50d_at_336_pixels():
    module, data = of_a_run(3, 336)
    model = {"_target_": "lockstep.models.from_timm", "name": "resnet50d", "pretrained": True}  # nothing is fetched
    assert flops_per_sample(module, model, data) == pytest.approx(59.3e9, rel=0.001)


def test_a_network_that_cannot_be_counted_costs_the_figure_alone(caplog):
    module, data = of_a_run(1, 28)
    with caplog.at_level(logging.INFO, "lockstep"):
        assert flops_per_s(module, BASIC_NET | {"no_such_argument": 1}, data, 10.0) is None
    assert "was not counted" in caplog.text
    assert flops_per_s(module, BASIC_NET, data, None) is None
    assert flops_per_s(nn.Identity(), BASIC_NET, data, 10.0) is None  # a LightningModule of another project
