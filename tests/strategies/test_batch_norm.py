"""Batch norm over processes against batch norm over the whole batch in one process. Two real gloo processes."""

from pathlib import Path

import forked
import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from lockstep.errors import UserError
from lockstep.strategies.batch_norm import GlobalBatchNorm, synchronise


def make_net() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4, momentum=None))


def batch() -> torch.Tensor:
    return torch.randn(12, 3, 9, 9, generator=torch.Generator().manual_seed(1)) * 3 + 5


def step(net: nn.Module, x: torch.Tensor, whole: int) -> torch.Tensor:
    """Two training passes and their gradients, of a loss that is summed over samples."""
    for _ in range(2):
        y = net(x)
        (y.square() * torch.arange(1.0, 5).view(1, -1, 1, 1)).sum().div(whole).backward()
    return y


def process(rank: str, port: str, folder: str, device: str) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2)
    torch.backends.cudnn.allow_tf32 = False
    net, x = make_net().to(device), batch().to(device)
    synchronise(net, device)
    y = step(net, x.chunk(2)[int(rank)], len(x))
    for parameter in net.parameters():
        torch.distributed.all_reduce(parameter.grad)
    found = {"y": y, "state": net.state_dict(), "grads": [p.grad for p in net.parameters()]}
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
def test_two_processes_normalise_as_one(device, port, tmp_path):
    """On a GPU, which the two share, torch's own SyncBatchNorm is used."""
    started = [forked.call(__file__, "process", rank, str(port), str(tmp_path), device) for rank in "01"]
    assert [each.wait(300) for each in started] == [0, 0]
    together = [torch.load(tmp_path / f"{rank}.pt", map_location="cpu") for rank in "01"]
    net, x = make_net(), batch()
    y = step(net, x, len(x))
    torch.testing.assert_close(torch.cat([result["y"] for result in together]), y, rtol=1e-5, atol=1e-5)
    for result in together:
        torch.testing.assert_close(result["state"], net.state_dict(), rtol=1e-5, atol=1e-6)
        # sums that cancel
        torch.testing.assert_close(result["grads"], [p.grad for p in net.parameters()], rtol=1e-4, atol=3e-4)


def test_one_process_in_channels_last_is_as_exact_as_several():
    """torch's own norm is off by 3e-6 here, which would be the difference to two processes."""
    x = torch.randn(64, 16, 28, 28, generator=torch.Generator().manual_seed(1)) * 2 + 3
    norm = nn.Sequential(nn.BatchNorm2d(16))
    expected = nn.BatchNorm2d(16).double()(x.double())
    synchronise(norm, "cpu")
    y = norm(x.contiguous(memory_format=torch.channels_last))
    assert (y - expected).norm() / expected.norm() < 5e-7
    torch.testing.assert_close(norm.double()(x.double()), expected, rtol=1e-12, atol=1e-12)


def test_keys_evaluation_and_frozen_parameters_stay_those_of_batch_norm():
    net, x = make_net(), batch()
    step(net, x, 12)
    net[1].weight.requires_grad_(False)
    expected, keys, weight = net.eval()(x), list(net.state_dict()), net[1].weight
    synchronise(net, "cpu")
    assert isinstance(net[1], GlobalBatchNorm)
    assert list(net.state_dict()) == keys and net[1].weight is weight and not weight.requires_grad
    torch.testing.assert_close(net(x), expected)


def test_the_activation_that_timm_puts_into_a_norm_is_kept():
    plain, net, x = BatchNormAct2d(3), nn.Sequential(BatchNormAct2d(3)), batch()
    synchronise(net, "cpu")
    torch.testing.assert_close(net(x), plain(x))
    assert net(x).min() == 0  # its ReLU


def test_a_network_without_batch_norm_has_none():
    with pytest.raises(UserError, match="this network has no batch normalisation"):
        synchronise(nn.Sequential(nn.Linear(2, 2)), "cpu")
