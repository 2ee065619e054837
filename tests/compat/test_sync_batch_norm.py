"""torch's SyncBatchNorm still waits for the GPU thrice; after the change of compat/ it does not."""

from collections.abc import Callable

import pytest
import torch
from fake_gpu import DEVICE, fake_gpu
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.nn.modules import _functions
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.compat.sync_batch_norm import without_masks
from lockstep.strategies.batch_norm import synchronise


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
    """When this fails, remove compat/sync_batch_norm.py."""
    with pytest.raises((DynamicOutputShapeException, torch.AcceleratorError)) as error:
        forward()
    assert any("[mask]" in str(entry.statement) for entry in error.traceback)


def test_lockstep_does_not(forward):
    without_masks()
    without_masks()
    assert forward() == []
    assert not torch.cuda.is_current_stream_capturing()


def test_networks_on_a_gpu_get_it(forward, monkeypatch):
    original = _functions.SyncBatchNorm.forward
    assert synchronise(nn.Sequential(nn.BatchNorm2d(3)), "cuda") == 1
    assert _functions.SyncBatchNorm.forward is not original
