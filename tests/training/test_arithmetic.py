"""How micro-batches become one update: norms and clipping, logical ranks, sums in the order of a tree, padded fused steps."""

import copy
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import forked
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lockstep.training import arithmetic
from lockstep.training.arithmetic import (
    LogicalRanks,
    StepArithmetic,
    TreeReduceScatter,
    TreeReduction,
    add_over_processes,
    clip_by_norm,
    tree_sum,
)
from lockstep.training.optim import padded_fused

# --- Clipping is torch's, with a norm that does not depend on how the gradients are divided ---

gradient_norm, exact_norm = StepArithmetic().gradient_norm, LogicalRanks(4).gradient_norm


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((1000, 300), (7,), (3, 4, 5))]


@pytest.mark.parametrize("way", [StepArithmetic(), LogicalRanks(4)])
@pytest.mark.parametrize("most", [0.5, 1e6])
def test_gradients_are_clipped_as_torch_does(most, way):
    ours, theirs = gradients(), [nn.Parameter(torch.zeros_like(grad)) for grad in gradients()]
    for parameter, grad in zip(theirs, gradients(), strict=True):
        parameter.grad = grad
    clip_by_norm(ours, most, way)
    expected = nn.utils.clip_grad_norm_(theirs, most)
    assert float(way.gradient_norm(gradients())) == pytest.approx(float(expected), rel=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.grad, rtol=1e-5, atol=0)
    clip_by_norm([], most, way)  # a network without gradients


def test_the_norm_is_the_same_of_parts():
    """In float32 these differ in the fifth or sixth digit."""
    grad = torch.randn(1_000_000, generator=torch.Generator().manual_seed(1))
    whole, *parts = (float(gradient_norm(list(grad.chunk(count)))) for count in (1, 2, 37))
    assert parts == pytest.approx([whole] * 2, rel=1e-12)


def test_the_exact_norm_is_the_norm():
    grads = [*gradients(), torch.zeros(3), torch.zeros(0)]
    assert float(exact_norm(grads)) == pytest.approx(float(gradient_norm(grads[:-1])), rel=1e-9)
    tiny = [grad * 1e-30 for grad in grads]
    assert float(exact_norm(tiny)) == pytest.approx(float(exact_norm(grads)) * 1e-30, rel=1e-6)
    assert float(exact_norm([torch.zeros(4)])) == 0.0
    for factor in (1e-150, 1e160):
        scaled = [grad.double() * factor for grad in grads]
        assert float(exact_norm(scaled)) == pytest.approx(float(exact_norm(grads)) * factor)
    for wrong in (torch.nan, torch.inf):
        assert float(exact_norm([*grads, torch.tensor([1.0, wrong])])) == torch.inf


def test_the_exact_norm_has_the_same_bits_in_any_order():
    """The order of a sum of floats shows in its last bits."""
    grad = torch.randn(100_003, generator=torch.Generator().manual_seed(1)) ** 5
    orders = [grad[torch.randperm(len(grad), generator=torch.Generator().manual_seed(i))] for i in range(8)]
    assert len({float(each.double().square().cumsum(0)[-1]) for each in orders}) > 1
    assert len({float(exact_norm([each])) for each in orders}) == 1


# --- What the logical ranks of a step leave in a network, against the same written out ---

PARTS = 4


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


def test_a_step_leaves_the_mean_of_gradients_and_statistics():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 2))
    net.register_buffer("large", torch.full((3,), torch.finfo(torch.float32).max))
    net.register_parameter("unused", nn.Parameter(torch.ones(2)))
    trainer = Mock(accumulate_grad_batches=PARTS, global_rank=0, world_size=1)
    net.trainer, ranks = trainer, LogicalRanks(PARTS)
    for _ in range(2):  # the second step begins with what the first one left
        written = [copy.deepcopy(net, {id(trainer): trainer}) for _ in range(PARTS)]
        for i, alone in enumerate(written):
            x = torch.randn(6, 3, 6, 6) * (1 + i) + i
            ranks.before_forward(net, i)
            ranks.to_backward(net, loss_of(net, x) / PARTS).backward()  # as Lightning divides it
            ranks.after_backward(net)
            loss_of(alone, x).backward()
        for name, p in net.named_parameters():
            others = [alone.get_parameter(name).grad for alone in written]
            expected = torch.stack([torch.zeros_like(p) if grad is None else grad for grad in others]).mean(0)
            torch.testing.assert_close(p.grad, expected)
        for name, buffer in net.named_buffers():
            others = torch.stack([alone.get_buffer(name) for alone in written])
            mean = others[0] if name == "large" else others.double().mean(0).to(buffer.dtype)
            torch.testing.assert_close(buffer, mean)
        assert ranks.losses.keys() == set(range(PARTS))
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    assert int(net[1].num_batches_tracked) == 2


# --- Sums have the same bits however many processes share the work. The reference is the tree, written out ---

LEAVES, WORLD = 8, 4


def leaves() -> list[list[Tensor]]:
    """Of each logical rank: tensors of several shapes and formats, whose sum depends on its order."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 3), (7,), (), (2, 3, 4, 4))
    made = [[torch.randn(s, generator=generator) * 10 ** (i % 5) for s in shapes] for i in range(LEAVES)]
    for tensors in made:
        tensors[3] = tensors[3].to(memory_format=torch.channels_last)
    return made


def written_out() -> list[Tensor]:
    parts = zip(*leaves(), strict=True)
    return [((a + b) + (c + d)) + ((e + f) + (g + h)) for a, b, c, d, e, f, g, h in parts]


def equal_sums(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def process(rank: str, port: str, folder: str) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=WORLD)
    share = LEAVES // WORLD
    total = TreeReduction()
    for tensors in leaves()[int(rank) * share :][:share]:
        total.add(tensors)
    summed = total.total()
    divided = [tensor.clone() for tensor in summed]
    add_over_processes(summed)
    arithmetic.AT_ONCE, at_once = 6, arithmetic.AT_ONCE  # elements: less than a tensor has
    add_over_processes(divided)
    arithmetic.AT_ONCE = at_once
    mixed = [torch.full((3,), float(rank)), torch.ones(2, dtype=torch.float64)]
    add_over_processes(mixed)
    # every world-th logical rank, as FSDP2 reduces them
    comm, parts = TreeReduceScatter(), []
    for part in range(share):
        flat = leaves()[part * WORLD + int(rank)][3].reshape(-1)
        out = comm.allocate((len(flat) // WORLD,), dtype=flat.dtype, device=flat.device)
        comm(out, flat, None, torch.distributed.ReduceOp.SUM)
        parts.append(out)
    found = {"sum": summed, "divided": divided, "mixed": mixed, "shard": tree_sum(torch.stack(parts))}
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_processes_add_up_to_the_same_bits(port, tmp_path):
    """Four, each with two of the eight logical ranks; tests/test_exact_shards.py has runs on other numbers."""
    started = [forked.call(__file__, "process", rank, str(port), str(tmp_path)) for rank in "0123"]
    assert [each.wait(300) for each in started] == [0] * WORLD
    one_by_one = [torch.stack(parts).cumsum(0)[-1] for parts in zip(*leaves(), strict=True)]
    assert not equal_sums(one_by_one[:1], written_out()[:1])  # or no test of the order could fail
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    for each in found:
        assert equal_sums(each["sum"], written_out())
        assert equal_sums(each["divided"], written_out())
        assert [part.tolist() for part in each["mixed"]] == [[0.0 + 1 + 2 + 3] * 3, [WORLD] * 2]
        assert each["mixed"][1].dtype == torch.float64
    assert torch.equal(torch.cat([each["shard"] for each in found]), written_out()[3].reshape(-1))


# --- Fused optimizers on CPUs: the same bits however the elements are divided into tensors, which torch alone does not have ---

COUNT, STEPS = 1003, 12
CUTS = [[500, 503], [251, 251, 251, 250], [7] * 143 + [2], [1000, 0, 3], [1, 1002]]
MADE: dict[str, Callable[..., Optimizer]] = {
    "adamw": partial(AdamW, lr=1e-3),
    "adam": partial(Adam, lr=1e-3, weight_decay=0.1, amsgrad=True),
    "sgd": partial(SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "plain": partial(SGD, lr=1e-2, weight_decay=0.1),
    "adagrad": partial(Adagrad, lr=1e-2),
}


def trained(make, sizes, *, fused=True, padded=True, resumed_at=-1) -> tuple[Optimizer, dict[str, Tensor]]:
    """The optimizer, and weights and states with the tensors joined again."""
    draw = partial(torch.randn, COUNT, generator=torch.Generator().manual_seed(0))
    parameters = [nn.Parameter(part.clone()) for part in draw().split(sizes)]

    def made() -> Optimizer:
        optimizer = make(parameters, fused=fused)
        return padded_fused(optimizer) if padded else optimizer

    optimizer = made()
    for step in range(STEPS):
        if step == resumed_at:
            saved, optimizer = optimizer.state_dict(), made()
            optimizer.load_state_dict(saved)
        for parameter, gradient in zip(parameters, draw().split(sizes), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    states = list(optimizer.state_dict()["state"].values())
    assert len(states) in (0, len(parameters))
    found = {name: [state[name] for state in states if state[name] is not None] for name in (states or [{}])[0]}
    joined = {name: values[0] if name == "step" else torch.cat(values) for name, values in found.items() if values}
    return optimizer, {"weights": torch.cat([p.detach() for p in parameters]), **joined}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", MADE)
def test_the_bits_do_not_depend_on_the_division_and_the_result_is_that_of_torch(name):
    _, whole = trained(MADE[name], [COUNT])
    _, expected = trained(MADE[name], [COUNT], fused=False, padded=False)
    for key, value in expected.items():
        assert torch.allclose(whole[key], value, rtol=1e-5, atol=1e-6), key
    for sizes in CUTS:
        optimizer, divided = trained(MADE[name], sizes, resumed_at=5 if sizes is CUTS[0] else -1)
        assert equal(divided, whole), sizes
        assert [len(p) for p in optimizer.param_groups[0]["params"]] == sizes
        assert optimizer.param_groups[0]["fused"] is True


@pytest.mark.skipif(platform.machine() != "x86_64", reason="seen on x86")
def test_torch_alone_rounds_the_ends_of_tensors_in_another_way():
    """When it no longer does, PaddedFusedStep can go."""
    pairs = [[trained(make, sizes, padded=False)[1] for sizes in ([COUNT], CUTS[2])] for make in MADE.values()]
    assert not all(equal(whole, divided) for whole, divided in pairs)


def test_a_parameter_without_gradient_stays_as_it_is():
    first, second = (torch.nn.Parameter(torch.ones(20)) for _ in range(2))
    optimizer = padded_fused(AdamW([first, second], fused=True))
    for _ in range(3):
        first.grad = torch.ones(20)
        optimizer.step()
    assert torch.equal(second, torch.ones(20))
    assert not torch.equal(first, torch.ones(20))
    second.grad = torch.ones(20)  # as after callbacks.freeze.unfreeze: a step that is not fused makes its state
    for _ in range(2):
        optimizer.step()
    assert (optimizer.state[first]["step"].item(), optimizer.state[second]["step"].item()) == (5, 2)
    assert {len(state) for state in optimizer.state.values()} == {3}
    assert optimizer.param_groups[0]["params"] == [first, second]


def test_a_step_that_fails_leaves_the_parameters_in_their_place_and_hooks_run_once():
    parameter, called = torch.nn.Parameter(torch.ones(20)), []
    optimizer = padded_fused(AdamW([parameter], fused=True))
    optimizer.register_step_post_hook(lambda *_: called.append(1))

    def closure() -> float:
        parameter.grad = torch.ones(20)
        return 0.5

    assert [optimizer.step(closure) for _ in range(2)] == [0.5, 0.5]
    optimizer.load_state_dict(optimizer.state_dict())  # after which torch marks the step of the class again
    optimizer.step(closure)
    assert len(called) == 3
    optimizer.param_groups[0]["lr"] = "odd"
    with pytest.raises((TypeError, RuntimeError)):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["params"] == [parameter]
    assert list(optimizer.state) == [parameter]
