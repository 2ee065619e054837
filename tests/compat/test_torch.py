"""torch still lacks what compat/torch.py adds; when a test fails, see whether its section can go."""

import copy
import inspect

import torch
from torch import Tensor, nn
from torch.nn.modules import _functions

from lockstep.compat.torch import copy_hooks, in_backward
from lockstep.strategies.batch_norm import synchronise


class Noting(torch.autograd.Function):
    found: bool

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        Noting.found = in_backward()
        return grads[0] * 2


def test_backward_and_grad_are_seen_and_torch_has_no_public_name_for_it_yet():
    public = [name for name in dir(torch.autograd.graph) if not name.startswith("_")]
    assert not [name for name in public if "task" in name or "in_backward" in name]
    x = torch.ones(2, requires_grad=True)
    for compute in (lambda y: y.backward(), lambda y: torch.autograd.grad(y, x)):
        Noting.found = False
        y = Noting.apply(x).sum()
        assert not in_backward()
        compute(y)
        assert Noting.found
        assert not in_backward()


def test_torch_asks_the_gpu_for_the_size_of_a_mask():
    """When this fails, remove compat/torch.py."""
    code = inspect.getsource(_functions.SyncBatchNorm.forward)
    assert "if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):" in code
    assert code.count("[mask]") == 3


def test_a_network_on_a_gpu_does_not(monkeypatch):
    seen: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    forward = staticmethod(lambda *_: seen.append(torch.cuda.is_current_stream_capturing()))
    monkeypatch.setattr(_functions.SyncBatchNorm, "forward", forward)
    for _ in range(2):
        synchronise(nn.Sequential(nn.BatchNorm2d(3)), "cuda")
    _functions.SyncBatchNorm.forward()
    assert seen == [True] and not torch.cuda.is_current_stream_capturing()


def test_a_copied_parameter_has_no_hooks():
    net = torch.nn.Linear(1, 1)
    net.weight.register_hook(lambda gradient: gradient * 0 + 7)
    net.bias.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", parameter.grad * 9))
    copied = copy.deepcopy(net)
    for of_weight, of_bias in ((1, 1), (7, 9)):
        copied(torch.ones(1, 1)).backward()
        assert (copied.weight.grad.item(), copied.bias.grad.item()) == (of_weight, of_bias)
        copied = copy_hooks(net, copy.deepcopy(net)).double().float()
