"""What fsdp communicates and when, on two processes of which the second is torch's fake one."""

from unittest.mock import MagicMock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.strategies import FSDP2


class Block(nn.Sequential):
    pass


class Net(nn.Module):
    """Two blocks and a rest."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(2)))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))

    def to(self, *args, **kwargs):
        """Sharding moves one block after the other: the whole network may not fit on a GPU."""
        assert not args and set(kwargs) <= {"memory_format"}
        return super().to(*args, **kwargs)


class Fits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).float().sum()


@pytest.fixture
def make(monkeypatch):
    """A strategy and a module whose network has two linear blocks."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))

    def made(*, precision: str = "32-true", **options: object) -> tuple[FSDP2, Fits]:
        strategy = FSDP2(
            blocks=["Block"], reshard_after_forward=True,
            sharded_checkpoints=False, timeout_s=60, **options,
        )  # fmt: skip
        monkeypatch.setattr(strategy, "_device_mesh", mesh)
        strategy.precision_plugin = MagicMock(precision=precision)
        strategy.parallel_devices = [torch.device("cpu")] * 2
        module = Fits()
        strategy.divide(module)
        return strategy, module

    yield made
    torch.distributed.destroy_process_group()


class ReduceScatters(TorchDispatchMode):
    """Their number. (CommDebugMode's hooks make FSDP2 warn of views.)"""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += str(function).startswith("c10d") and "reduce_scatter" in str(function)
        return function(*args, **(kwargs or {}))


def reduced(strategy: FSDP2, module: Fits, *, last: bool) -> int:
    """The collectives that average gradients in one micro-batch, run as Lightning runs it."""
    with ReduceScatters() as seen, _block_parallel_sync_behavior(strategy, block=not last):
        module.backward(module.training_step(torch.ones(2, 8)))
    return seen.count


@pytest.mark.parametrize("each", [False, True])
def test_gradients_are_communicated_once_a_step_or_in_each_micro_batch_where_memory_is_short(each, make):
    strategy, module = make(reduce_each_micro_batch=each)
    for _ in range(2):
        first, second, last = (reduced(strategy, module, last=last) for last in (False, False, True))
        assert last > 0 and first == second == (last if each else 0)
        assert all(isinstance(p.grad, DTensor) for p in module.parameters())
        module.zero_grad()


def test_no_weight_stays_in_bf16_after_its_block(make):
    """Autocast keeps a copy of each weight for backward. What the norms and the head compute with stays in fp32."""
    dtypes, weights = {}, {}  # what modules compute with; how many weights in bf16 are kept for backward
    for precision in ("32-true", "bf16-mixed"):  # in 32-true, with autocast around it
        _, module = make(precision=precision)
        for name in ("blocks.0.0", "blocks.0.1", "head"):
            layer = module.net.get_submodule(name)
            layer.register_forward_pre_hook(lambda m, _, name=name: dtypes.update({name: m.weight.dtype}))
        saved: list[torch.Tensor] = []
        keep = torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), keep:
            loss = module.training_step(torch.ones(2, 8))
        kept = [t.untyped_storage().nbytes() for t in saved if t.dtype == torch.bfloat16 and t.shape == (8, 8)]
        weights[precision] = sum(kept) // (8 * 8 * 2)
        module.backward(loss)
        assert {(p.dtype, p.grad.dtype) for p in module.parameters()} == {(torch.float32, torch.float32)}
    assert dtypes == {"blocks.0.0": torch.bfloat16, "blocks.0.1": torch.float32, "head": torch.float32}  # bf16-mixed
    assert weights == {"32-true": 1, "bf16-mixed": 0}  # of the second block


def test_shards_and_optimizer_leave_the_gpu_when_training_ends(make):
    strategy, _ = make()
    strategy._lightning_module = MagicMock()
    strategy.accelerator, strategy.checkpoint_io, strategy.cluster_environment = MagicMock(), MagicMock(), MagicMock()
    strategy.teardown()
    strategy._lightning_module.cpu.assert_called_once()
    strategy.checkpoint_io.teardown.assert_called_once()
