"""torch still lacks what compat/torch.py adds; when a test fails, see whether its section can go."""

from collections.abc import Callable

import pytest
import torch
from fake_gpu import DEVICE, fake_gpu
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.nn.modules import _functions
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.compat.torch import in_backward
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


@pytest.fixture
def forward(monkeypatch) -> Callable[[], list[str]]:
    """A training pass in one of two processes, with kernels that know shapes only; returns where it waited."""

    def statistics(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape[1]), x.new_empty(x.shape[1])

    def pass_() -> list[str]:
        with fake_gpu(monkeypatch) as waits:
            norm = nn.SyncBatchNorm(3).to(DEVICE)
            waits.on = True
            with torch.no_grad():  # autograd needs a driver
                norm(torch.ones(2, 3, 4, 4, device=DEVICE))
        return waits.places

    monkeypatch.setattr(torch, "batch_norm_stats", statistics)
    monkeypatch.setattr(torch, "batch_norm_gather_stats_with_counts", statistics)
    monkeypatch.setattr(torch, "batch_norm_elemt", lambda x, *_: torch.empty_like(x))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(_functions.SyncBatchNorm, "forward", staticmethod(_functions.SyncBatchNorm.forward))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield pass_
    torch.distributed.destroy_process_group()


def test_torch_asks_the_gpu_for_the_size_of_a_mask(forward):
    """When this fails, remove compat/torch.py."""
    with pytest.raises((DynamicOutputShapeException, torch.AcceleratorError)) as error:
        forward()
    assert any("[mask]" in str(entry.statement) for entry in error.traceback)


def test_a_network_on_a_gpu_does_not(forward):
    for _ in range(2):
        synchronise(nn.Sequential(nn.BatchNorm2d(3)), "cuda")
    assert forward() == []
    assert not torch.cuda.is_current_stream_capturing()
