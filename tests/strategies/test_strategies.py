"""What strategies do to a network and to an optimizer's state: blocks, rows, precision, buckets."""

import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.errors import UserError
from lockstep.strategies import DDP
from lockstep.strategies.base import by_index
from lockstep.strategies.fsdp import named_blocks, repeated_blocks
from lockstep.strategies.replicas import DataParallel, Replicas
from project.model import BasicNet

# --- The optimizer's state of a checkpoint, loaded by a process that computes in a different way ---


def optimizer(kind: type, **options: object) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind([torch.nn.Parameter(torch.ones(3))], lr=0.1, **options)
    made.param_groups[0]["params"][0].grad = torch.ones(3)
    made.step()
    return made


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("saved", "own"), [({"fused": True}, {"foreach": True}), ({"foreach": False}, {"fused": True})]
)
def test_how_a_step_is_computed_is_not_taken_from_a_checkpoint(kind, saved, own):
    """A fused SGD of one process crashed on the shards of another strategy."""
    then = optimizer(kind, **saved, weight_decay=0.3)
    group, state = then.state_dict()["param_groups"][0], then.state_dict()["state"].get(0, {})
    now = optimizer(kind, **own)
    expected = {key: now.param_groups[0][key] for key in ("fused", "foreach", "differentiable")}
    own = [{"w": now.param_groups[0]["params"][0]}]
    now.load_state_dict(by_index(now, own, {"param_groups": [{**group, "params": ["w"]}], "state": {"w": state}}))
    assert {key: now.param_groups[0][key] for key in expected} == expected
    assert now.param_groups[0]["weight_decay"] == 0.3
    now.step()


# --- dp: replicas on a CPU that stands in for two GPUs, with torch's threads for them ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_replicas_compute_in_the_precision_of_the_run(dtype, monkeypatch):
    """A thread's own dtype for autocast on a CPU is bfloat16; on a GPU it is float16, even under bf16-mixed."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    for name in ("current_stream", "device_index"):
        monkeypatch.setattr(torch.accelerator, name, lambda _: nullcontext())
    monkeypatch.setattr(sys.modules["torch.nn.parallel.parallel_apply"], "_get_device_index", lambda *_: 0)
    enabled = torch.is_autocast_enabled  # without an argument it is CUDA's
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": enabled(device))
    replicas = Replicas(nn.Linear(4, 3))  # on a CPU without device_ids
    replicas.device_ids, replicas.src_device_obj = [0, 0], torch.device("cpu")
    halves = [(half,) for half in torch.randn(6, 4).chunk(2)]
    with torch.autocast("cpu", dtype=dtype) if dtype != torch.float32 else nullcontext():
        found = replicas.parallel_apply([replicas.module] * 2, halves, [{}, {}])
    assert [(y.dtype, y.shape) for y in found] == [(dtype, (3, 3))] * 2


def test_each_network_of_a_module_is_computed_by_its_replicas(monkeypatch):
    """Under its own name and keys. A replica computes itself."""

    class Halves:
        def __init__(self, net: nn.Module, device_ids: list[torch.device]) -> None:
            self.net, self.device_ids = net, device_ids

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            asked.append(self.device_ids)
            replica = self.net._replicate_for_data_parallel()
            for name, p in self.net.named_parameters():
                setattr(replica, name, p * 1)
            return torch.cat([replica(half) for half in x.chunk(2)])

    asked: list[list[torch.device]] = []
    monkeypatch.setattr(sys.modules["lockstep.strategies.replicas"], "Replicas", Halves)
    module, x = pl.LightningModule(), torch.randn(6, 4)
    module.body, module.head = nn.Linear(4, 3), nn.Linear(3, 2)
    expected, keys = module.head(module.body(x)), list(module.state_dict())
    for count in (1, 2):
        strategy = DataParallel()
        strategy.parallel_devices = [torch.device("cuda", place) for place in range(count)]
        strategy.divide(module)
        torch.testing.assert_close(module.head(module.body(x)), expected)
        assert asked == [strategy.parallel_devices] * 2 * (count > 1)
    assert (type(module.body).__name__, list(module.state_dict())) == ("Linear", keys)


@settings(deadline=None)
@given(gpus=st.integers(0, 9), first=st.integers(0, 50), count=st.integers(1, 40))
def test_the_rows_of_each_gpu_are_the_chunks_that_torch_gives_it(gpus, first, count):
    strategy = DataParallel()
    strategy.parallel_devices = [torch.device("cuda", place) for place in range(gpus)]
    chunks = torch.arange(first, first + count).chunk(gpus) if gpus else [torch.arange(first, first + count)]
    found = strategy.device_rows(range(first, first + count))
    assert [list(rows) for rows in found.values()] == [chunk.tolist() for chunk in chunks]
    assert list(found) == (strategy.parallel_devices[: len(chunks)] or [torch.device("cpu")])


# --- ddp: a resume begins with a backward that leaves nothing behind ---


def test_rebuilt_buckets_get_gradients_in_the_recorded_order_and_leave_none():
    net, arrived = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)), []
    before = {name: value.clone() for name, value in net.state_dict().items()}
    parameters = [*net.parameters()]
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: arrived.append(index))
    strategy = SimpleNamespace(
        model=net, lightning_module=net, parameters=parameters, root_device=torch.device("cpu"),
        averaged=[True] * 5 + [False], gradient_order=[3, 0, 4, 2], is_static=False,
    )  # fmt: skip
    DDP.rebuild_buckets(strategy)
    assert arrived == [3, 0, 4, 2, 1]  # the last had no gradient in the first backward
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in parameters) and "forward" not in vars(net)


# --- fsdp: which parts of a network are sharded by themselves ---


@pytest.mark.parametrize(("name", "blocks"), [
    ("resnet50d", {"Bottleneck": 16}), ("vit_tiny_patch16_224", {"Block": 12}), ("convnext_tiny", None), ("basic_net", {"Linear": 1}),
])  # fmt: skip
def test_the_blocks_of_a_network_are_its_repeated_parts_and_share_no_parameter(name, blocks):
    with torch.device("meta"):
        net = BasicNet() if name == "basic_net" else timm.create_model(name)
    found = list(repeated_blocks(net))
    owned = [id(p) for block in found for p in block.parameters()]
    assert len(owned) == len(set(owned)) and set(owned) <= {id(p) for p in net.parameters()}
    assert blocks in (None, Counter(type(block).__name__ for block in found))


def test_blocks_by_class_name():
    net = BasicNet()
    assert [type(block) for block in named_blocks(net, ["Conv2d"])] == [nn.Conv2d, nn.Conv2d]
    with pytest.raises(UserError, match=r"has no Bottleneck; its classes are .*Conv2d"):
        named_blocks(net, ["Bottleneck"])
