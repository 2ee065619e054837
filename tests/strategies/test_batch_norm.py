"""Batch norm over processes against batch norm over the whole batch in one process. Two real gloo processes."""

from pathlib import Path

import forked
import pytest
import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.launch import local
from lockstep.strategies.batch_norm import GlobalBatchNorm, synchronise


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4, momentum=None)
    )


def batch() -> torch.Tensor:
    return torch.randn(12, 3, 9, 9, generator=torch.Generator().manual_seed(1)) * 3 + 5


def step(net: nn.Module, x: torch.Tensor, whole: int) -> torch.Tensor:
    """Two training passes and their gradients, of a loss that is summed over samples."""
    for _ in range(2):
        y = net(x)
        (y.square() * torch.arange(1.0, 5).view(1, -1, 1, 1)).sum().div(whole).backward()
    return y


def process(rank: str, world: str, port: str, folder: str, device: str) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=int(world))
    net = make_net().to(device)
    synchronise(net, device)
    x = batch().to(device)
    y = step(net, x.chunk(int(world))[int(rank)], len(x))
    for parameter in net.parameters():
        torch.distributed.all_reduce(parameter.grad)
    found = {"y": y, "state": net.state_dict(), "grads": [p.grad for p in net.parameters()]}
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def on_a_gpu() -> object:
    """Two processes share it. torch's own SyncBatchNorm is used there."""
    return pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.fixture(scope="module", params=["cpu", on_a_gpu()])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("batch_norm")
    with local.held_port() as port:
        arguments = ("2", str(port), str(folder), request.param)
        processes = [forked.call(__file__, "process", str(rank), *arguments) for rank in range(2)]
        assert [process.wait(300) for process in processes] == [0, 0]
    return [torch.load(folder / f"{rank}.pt", map_location="cpu") for rank in range(2)]


def test_two_processes_normalise_as_one(together):
    net, x = make_net(), batch()
    y = step(net, x, len(x))
    torch.testing.assert_close(torch.cat([result["y"] for result in together]), y, rtol=1e-5, atol=1e-5)
    for result in together:
        for key, value in net.state_dict().items():
            torch.testing.assert_close(result["state"][key], value, rtol=1e-5, atol=1e-6)
        for found, parameter in zip(result["grads"], net.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=3e-4)  # sums that cancel


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
    from timm.layers import BatchNormAct2d

    plain, net, x = BatchNormAct2d(3), nn.Sequential(BatchNormAct2d(3)), batch()
    synchronise(net, "cpu")
    torch.testing.assert_close(net(x), plain(x))
    assert net(x).min() == 0  # its ReLU


def test_a_network_without_batch_norm_has_none():
    with pytest.raises(UserError, match="this network has no batch normalisation"):
        synchronise(nn.Sequential(nn.Linear(2, 2)), "cpu")
