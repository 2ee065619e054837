"""What the logical ranks of a step leave in a network, against the same written out."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.training.arithmetic import LogicalRanks

SHARDS = 4
TRAINER: Any = SimpleNamespace(
    accumulate_grad_batches=SHARDS, global_rank=0, world_size=1, strategy=SimpleNamespace(contiguous_micro_batches=True)
)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 2))
    net.register_buffer("large", torch.full((3,), torch.finfo(torch.float32).max))
    net.register_parameter("unused", nn.Parameter(torch.ones(2)))
    return net


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 3, 6, 6, generator=generator) * (1 + i) + i for i in range(SHARDS)]


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


def test_a_step_leaves_the_mean_of_gradients_and_statistics():
    net, ranks = make_net(), LogicalRanks(SHARDS)
    module = SimpleNamespace(net=net, trainer=TRAINER)
    written = [copy.deepcopy(net) for _ in range(SHARDS)]
    for _ in range(2):  # the second step begins with what the first one left
        for alone in written:
            alone.load_state_dict(net.state_dict())
            alone.zero_grad()
        for i, x in enumerate(batches()):
            ranks.before_forward(module, i)
            loss = ranks.to_backward(module, loss_of(net, x))
            (loss / SHARDS).backward()  # as Lightning divides it
            ranks.after_backward(module)
            loss_of(written[i], x).backward()
        for name, p in net.named_parameters():
            others = [dict(alone.named_parameters())[name].grad for alone in written]
            expected = torch.stack([torch.zeros_like(p) if grad is None else grad for grad in others]).mean(0)
            torch.testing.assert_close(p.grad, expected)
        for name, buffer in net.named_buffers():
            others = torch.stack([dict(alone.named_buffers())[name] for alone in written])
            torch.testing.assert_close(
                buffer, others[0] if name == "large" else others.double().mean(0).to(buffer.dtype)
            )
        assert ranks.losses.keys() == set(range(SHARDS))
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    assert int(net[1].num_batches_tracked) == 2


def test_micro_batches_that_are_no_whole_step_are_noticed():
    net, ranks = make_net(), LogicalRanks(SHARDS)
    module = SimpleNamespace(net=net, trainer=TRAINER)
    for i in range(3):
        ranks.before_forward(module, i)
        ranks.to_backward(module, loss_of(net, batches()[i])).backward()
        ranks.after_backward(module)
    assert all(p.grad is None for p in net.parameters())
    with pytest.raises(AssertionError, match="no whole step"):
        ranks.before_forward(module, 0)
