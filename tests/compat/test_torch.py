"""torch still lacks what compat/torch.py adds; when a test fails, see whether its section can go."""

import inspect
import os

import forked
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.modules import _functions
from torch.utils.flop_counter import FlopCounterMode

from lockstep.compat.torch import (
    Operations,
    gather_after_writes,
    in_backward,
    in_one_process,
    tell_first_call,
    tell_initial_seed,
    whole_draws,
    whole_values,
)
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


def test_torch_does_not_count_the_attention_of_cpus():
    query_BHTC = torch.randn(2, 4, 8, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        scaled_dot_product_attention(query_BHTC, query_BHTC, query_BHTC).sum().backward()
    assert counted.get_total_flops() == 0
    with Operations() as operations:
        scaled_dot_product_attention(query_BHTC, query_BHTC, query_BHTC).sum().backward()
    one_product = 2 * 2 * 4 * 8 * 8 * 16
    assert operations.total == (2 + 5) * one_product  # forward; backward repeats one


@pytest.fixture
def mesh(tmp_path, monkeypatch):
    """Of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_values_of_a_sharded_tensor_are_those_of_a_shard(mesh, monkeypatch):
    for name in {"data", "item", "__float__", "__int__", "__bool__", "tolist", "numpy"} & {*vars(DTensor)}:
        monkeypatch.delattr(DTensor, name)  # of an earlier test
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    weight.data = weight.data * 3
    part = DTensor.from_local(torch.tensor(5.0), mesh, [Partial("sum")])
    monkeypatch.setattr(part, "full_tensor", lambda: torch.tensor(7.0), raising=False)  # as of several processes
    assert (weight.full_tensor().sum(), float(part)) == (8, 5)  # when this fails, remove whole_values
    whole_values()
    weight.data = weight.data * 3
    assert weight.full_tensor().sum() == 24
    weight.data = torch.full((4, 2), 2.0)
    assert weight.full_tensor().sum() == 16 and weight.requires_grad
    assert (float(part), part.item(), int(part), bool(part)) == (7, 7, 7, True)
    assert weight.tolist() == [[2, 2]] * 4


def test_only_a_replaced_function_tells_that_the_seed_was_asked_for():
    state, told = torch.get_rng_state(), []
    assert torch.initial_seed() == torch.initial_seed()
    assert torch.equal(torch.get_rng_state(), state)  # when this fails, remove tell_initial_seed
    with tell_initial_seed(lambda: told.append(1)):
        seed = torch.initial_seed()
    assert (told, seed) == ([1], torch.initial_seed())


DRAWS = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "randint_like": lambda t: torch.randint_like(t, 9),
    "normal_": lambda t: t.clone().normal_(1, 2),
    "uniform_": lambda t: t.clone().uniform_(1, 2),
    "bernoulli_": lambda t: t.clone().bernoulli_(0.5),
    "bernoulli": torch.bernoulli,
}


def draw(rank: str, folder: str) -> None:
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=int(rank), world_size=2)
    plain = torch.arange(9.0)[:, None].expand(9, 8) / 9
    tensor = distribute_tensor(plain, init_device_mesh("cpu", (2,)), [Shard(0)])  # 5 and 4 rows

    def drawn(name: str, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return DRAWS[name](x)

    whole = drawn("randn_like", plain.contiguous())
    assert not torch.equal(drawn("randn_like", tensor).full_tensor(), whole)  # when this fails, remove whole_draws
    whole_draws()
    for name in DRAWS:
        assert torch.equal(drawn(name, tensor).full_tensor(), drawn(name, plain.contiguous())), name
    torch.distributed.destroy_process_group()


def test_shards_are_drawn_by_themselves(tmp_path):
    ranks = [forked.call(__file__, "draw", str(rank), str(tmp_path)) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]


def test_fsdp_has_no_public_name_for_waiting_for_writes(mesh, monkeypatch):
    public = [name for name in dir(FSDPModule) if not name.startswith("_")]
    assert not [name for name in public if "stream" in name or "wait" in name]
    net = fully_shard(nn.Linear(4, 4), mesh=mesh)
    net(torch.ones(1, 4))
    gather_after_writes(net)  # nothing on a CPU
    waited = []
    stream = type("Stream", (), {"wait_stream": lambda _, other: waited.append(other)})
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "current")
    context = net._get_fsdp_state()._comm_ctx
    context.all_gather_copy_in_stream = context.all_gather_stream = stream()
    gather_after_writes(net)
    assert waited == ["current"] * 2


def test_only_a_private_name_tells_whether_a_compiled_module_is_called():
    net, calls = nn.Linear(1, 1), []
    net.compile(backend="eager")
    assert not [name for name in dir(net) if "compiled" in name and not name.startswith("_")]
    tell_first_call(net, lambda: calls.append(1))
    net.forward(torch.ones(1, 1))
    assert not calls
    assert torch.equal(net(torch.ones(1, 1)), net(torch.ones(1, 1))) and calls == [1]


def test_torch_is_not_told_that_a_process_is_alone(monkeypatch):
    asked = torch.distributed.is_initialized, torch.distributed.get_rank, torch.distributed.get_world_size
    assert [[*inspect.signature(function).parameters] for function in asked] == [[], ["group"], ["group"]]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = lambda: (torch.distributed.is_initialized(), torch.distributed.get_world_size(), os.environ["WORLD_SIZE"])  # noqa: E731
    assert in_one_process(found) == (False, 1, "1") and found() == (True, 2, "2")
