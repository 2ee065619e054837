"""The base class: what it makes of targets of any kind."""

import pytest
import torch

from lockstep.tasks import Task

BOXES = {"boxes": [torch.zeros(1, 4), torch.zeros(3, 4)], "labels": [torch.zeros(1), torch.zeros(3)]}


@pytest.mark.parametrize("target", [torch.arange(2), ["a", "b"], (1, 2.5)])
def test_targets_with_a_value_per_sample_are_a_column(target):
    assert Task().targets({"target": target}) == {"target": target}


@pytest.mark.parametrize("target", [torch.zeros(2, 3), BOXES, BOXES["boxes"], {"a": 1}, "ab"], ids=type)
def test_other_targets_are_none(target):
    assert Task().targets({"target": target}) == {}
