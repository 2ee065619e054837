"""Which parts of a network fsdp shards by themselves."""

import pytest
import timm
import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.models import BasicNet
from lockstep.strategies.fsdp import named_blocks, repeated_blocks


def test_the_blocks_of_a_resnet_are_its_bottlenecks():
    with torch.device("meta"):
        net = timm.create_model("resnet50d")
    blocks = list(repeated_blocks(net))
    assert [type(block).__name__ for block in blocks if type(block).__name__ != "Conv2d"] == ["Bottleneck"] * 16


def test_the_blocks_of_a_transformer_are_its_layers():
    with torch.device("meta"):
        net = timm.create_model("vit_tiny_patch16_224")
    assert [type(block).__name__ for block in repeated_blocks(net)] == ["Block"] * 12


def test_no_parameter_belongs_to_two_blocks():
    with torch.device("meta"):
        nets = [timm.create_model(name) for name in ("resnet50d", "convnext_tiny", "vit_tiny_patch16_224")]
    for net in [*nets, BasicNet()]:
        owned = [id(p) for block in repeated_blocks(net) for p in block.parameters()]
        assert len(owned) == len(set(owned))
        assert set(owned) <= {id(p) for p in net.parameters()}


def test_basic_net_shards_its_one_large_layer():
    assert [type(block) for block in repeated_blocks(BasicNet())] == [nn.Linear]


def test_blocks_by_class_name():
    net = BasicNet()
    assert [type(block) for block in named_blocks(net, ["Conv2d"])] == [nn.Conv2d, nn.Conv2d]
    with pytest.raises(UserError, match=r"has no Bottleneck; its classes are .*Conv2d"):
        named_blocks(net, ["Bottleneck"])
