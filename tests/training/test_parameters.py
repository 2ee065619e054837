"""Groups of parameters: equal to timm's for timm's networks, and by order for others."""

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from lockstep.models import BasicNet
from lockstep.training import optim


def by_parameter(groups, lr: float) -> dict[int, tuple[float, float]]:
    """Rate and decay of each parameter; timm gives rates as factors."""
    return {
        id(p): (group["lr"] if "lr" in group else lr * group.get("lr_scale", 1.0), group["weight_decay"])
        for group in groups
        for p in group["params"]
    }


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext"])
def test_groups_of_timms_networks_are_timms(name):
    net = timm.create_model(name, num_classes=7)
    spared = net.no_weight_decay() if hasattr(net, "no_weight_decay") else ()
    own = optim.groups(net, lr=0.1, weight_decay=0.05, no_decay=True, layer_decay=0.75)
    expected = param_groups_layer_decay(net, weight_decay=0.05, layer_decay=0.75, no_weight_decay_list=spared)
    found, wanted = by_parameter(own, 0.1), by_parameter(expected, 0.1)
    assert found.keys() == wanted.keys() == {id(p) for p in net.parameters()}
    assert all(found[p] == pytest.approx(wanted[p]) for p in wanted)
    expected = param_groups_weight_decay(net, weight_decay=0.05, no_weight_decay_list=spared)
    assert by_parameter(optim.groups(net, lr=0.1, weight_decay=0.05, no_decay=True), 0.1) == by_parameter(expected, 0.1)  # fmt: skip


def test_layers_of_other_networks_are_their_blocks_in_order():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 3))
    net.register_parameter("scale", nn.Parameter(torch.ones(1)))
    found = by_parameter(optim.groups(net, lr=1.0, layer_decay=0.5, head_lr=9.0), 1.0)
    rates = {name: found[id(p)][0] for name, p in net.named_parameters() if not name.endswith("bias")}
    assert rates == {"scale": 0.125, "0.weight": 0.125, "2.0.weight": 0.25, "2.1.weight": 0.5, "3.weight": 9.0}


def test_the_head_is_the_classifier_or_the_last_layer():
    vit, own = timm.create_model("test_vit", num_classes=7), BasicNet(in_channels=1, image_size=28, num_classes=7)
    assert optim.head_of(vit) is vit.get_classifier()
    assert [len(p) for p in optim.head_of(own).parameters()] == [7, 7]
