"""torch still lacks what compat/torch.py adds; when a test fails, see whether its section can go."""

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.modules import _functions

from lockstep.compat.torch import assignable_data, copy_hooks, in_backward, tell_first_call
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


@pytest.fixture
def mesh(tmp_path, monkeypatch):
    """Of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_data_assigned_to_a_sharded_tensor_is_lost(mesh, monkeypatch):
    if "data" in vars(DTensor):  # of an earlier test
        monkeypatch.delattr(DTensor, "data")
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    weight.data = weight.data * 3
    assert weight.full_tensor().sum() == 8  # when this fails, remove assignable_data
    assignable_data()
    weight.data = weight.data * 3
    assert weight.full_tensor().sum() == 24
    weight.data = torch.full((4, 2), 2.0)
    assert weight.full_tensor().sum() == 16 and weight.requires_grad


def test_only_a_private_name_tells_whether_a_compiled_module_is_called():
    net, calls = nn.Linear(1, 1), []
    net.compile(backend="eager")
    assert not [name for name in dir(net) if "compiled" in name and not name.startswith("_")]
    tell_first_call(net, lambda: calls.append(1))
    net.forward(torch.ones(1, 1))
    assert not calls
    assert torch.equal(net(torch.ones(1, 1)), net(torch.ones(1, 1))) and calls == [1]
