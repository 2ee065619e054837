"""The optimizer's state of a checkpoint, loaded by a process that computes in a different way; and dp's replicas on a CPU that stands in
for two GPUs, with torch's threads for them."""

import sys
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.strategies.base import DataParallel, Replicas, by_index


def optimizer(kind: type, **options: object) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind([torch.nn.Parameter(torch.ones(3))], lr=0.1, **options)
    made.param_groups[0]["params"][0].grad = torch.ones(3)
    made.step()
    return made


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("saved", "own"),
    [({"fused": True}, {"fused": False}), ({"foreach": False}, {"fused": True}), ({}, {"foreach": True})],
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


@pytest.fixture
def replicas(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
    monkeypatch.setattr(sys.modules["torch.nn.parallel.parallel_apply"], "_get_device_index", lambda *_: 0)
    enabled = torch.is_autocast_enabled  # without an argument it is CUDA's
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": enabled(device))
    made = Replicas(nn.Linear(4, 3))  # on a CPU without device_ids
    made.device_ids, made.src_device_obj = [0, 0], torch.device("cpu")
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_replicas_compute_in_the_precision_of_the_run(replicas, dtype):
    """A thread's own dtype for autocast on a CPU is bfloat16; on a GPU it is float16, even under bf16-mixed."""
    halves = [(half,) for half in torch.randn(6, 4).chunk(2)]
    with torch.autocast("cpu", dtype=dtype) if dtype != torch.float32 else nullcontext():
        found = replicas.parallel_apply([replicas.module] * 2, halves, [{}, {}])
    assert [(y.dtype, y.shape) for y in found] == [(dtype, (3, 3))] * 2


@settings(deadline=None)
@given(gpus=st.integers(0, 9), first=st.integers(0, 50), count=st.integers(1, 40))
def test_the_rows_of_each_gpu_are_the_chunks_that_torch_gives_it(gpus, first, count):
    strategy = DataParallel()
    strategy.parallel_devices = [torch.device("cuda", place) for place in range(gpus)]
    chunks = torch.arange(first, first + count).chunk(gpus) if gpus else [torch.arange(first, first + count)]
    found = strategy.device_rows(range(first, first + count))
    assert [list(rows) for rows in found.values()] == [chunk.tolist() for chunk in chunks]
    assert list(found) == (strategy.parallel_devices[: len(chunks)] or [torch.device("cpu")])
