"""Cheap random numbers are as good as torch's: kept as often as they should be, independent, scaled, repeatable."""

import pytest
import torch
from torch import nn

from lockstep.models.basic_net import Dropout


@pytest.mark.parametrize("p", [0.25, 0.5, 0.3, 0.1, 1 / 256, 0.999])
def test_elements_are_dropped_as_often_as_p_says_each_by_itself_and_the_rest_keeps_the_mean(p):
    torch.manual_seed(0)
    count = 2_000_000
    y = Dropout(p)(torch.ones(count))
    dropped = (y == 0).double()
    assert abs(dropped.mean().item() - p) < 5 * (p * (1 - p) / count) ** 0.5 + 2**-17
    assert y.double().mean().item() == pytest.approx(1, abs=0.01 if p < 0.9 else 0.1)
    assert len(y.unique()) == 2
    for distance in (1, 2, 3, 4, 7, 8, 16):  # eight or four come from one draw
        correlation = ((dropped[:-distance] - p) * (dropped[distance:] - p)).mean() / (p * (1 - p))
        assert abs(correlation.item()) < 0.005
    torch.testing.assert_close(dropped.view(-1, 8).mean(0), torch.full((8,), p).double(), atol=0.006, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_gradient_goes_where_the_value_went(dtype):
    torch.manual_seed(3)
    x = torch.rand(64, 33, dtype=dtype).add_(1).requires_grad_()
    y = Dropout(0.25)(x)
    y.sum().backward()
    assert y.dtype == dtype
    torch.testing.assert_close(y, x * x.grad)
    assert set(x.grad.unique().tolist()) == {0.0, torch.tensor(4 / 3, dtype=dtype).item()}


@pytest.mark.parametrize("backend", [None, "eager"])
def test_the_memory_format_stays_a_seed_repeats_the_mask_and_nothing_and_all_are_as_in_torch(backend):
    x, dropout = torch.rand(8, 16, 5, 5).contiguous(memory_format=torch.channels_last), Dropout(0.5)
    if backend:
        dropout.compile(backend=backend)
    torch.manual_seed(4)
    first = dropout(x)
    torch.manual_seed(4)
    assert torch.equal(dropout(x), first)
    assert first.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(dropout(x), first)
    for p in (0.0, 1.0):
        assert torch.equal(Dropout(p)(x), nn.Dropout(p)(x))
    assert torch.equal(Dropout(0.5).eval()(x), x)
