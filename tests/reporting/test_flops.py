"""Operations are counted as the shapes say, and nothing is computed for it."""

import logging

import pytest
from omegaconf import OmegaConf

from lockstep.reporting.flops import flops_per_image, flops_per_s

ABOUT = {"channels": 1, "image_size": 28, "classes": list("0123456789")}
BASIC_NET = {"_target_": "lockstep.models.BasicNet", "name": "basic_net"}


def test_basic_nets_operations_are_those_of_its_shapes():
    first = 26 * 26 * 32 * 9  # multiplications and additions
    second = 24 * 24 * 64 * 32 * 9
    linear = 9216 * 128 + 128 * 10
    forward = first + second + linear
    backward = first + 2 * (second + linear)  # no gradient of the images
    assert flops_per_image(BASIC_NET, ABOUT) == 2 * (forward + backward)


def test_resnet50d_at_336_pixels():
    about = ABOUT | {"channels": 3, "image_size": 336}
    assert flops_per_image({"_target_": "lockstep.models.from_timm", "name": "resnet50d"}, about) == pytest.approx(
        59.3e9, rel=0.001
    )


def test_a_network_that_cannot_be_counted_costs_the_figure_alone(caplog):
    cfg = OmegaConf.create({"model": {"_target_": "lockstep.models.BasicNet", "no_such_argument": 1}})
    with caplog.at_level(logging.INFO, "lockstep"):
        assert flops_per_s(cfg, ABOUT, 10.0) is None
    assert "was not counted" in caplog.text
    assert flops_per_s(OmegaConf.create({"model": BASIC_NET}), ABOUT, None) is None
