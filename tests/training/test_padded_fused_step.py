"""Fused optimizers on CPUs: the same bits however the elements are divided into tensors, which torch alone does not have."""

import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lockstep.training.arithmetic import padded_fused

COUNT, STEPS = 1003, 12
CUTS = [[500, 503], [251, 251, 251, 250], [7] * 143 + [2], [1000, 0, 3], [1, 1002]]
MADE: dict[str, Callable[..., Optimizer]] = {
    "adamw": partial(AdamW, lr=1e-3),
    "adam": partial(Adam, lr=1e-3, weight_decay=0.1, amsgrad=True),
    "sgd": partial(SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "plain": partial(SGD, lr=1e-2, weight_decay=0.1),
    "adagrad": partial(Adagrad, lr=1e-2),
}


def trained(
    make: Callable[..., Optimizer], sizes: list[int], *, fused: bool = True, aligned: bool = True, resumed_at: int = -1
) -> tuple[Optimizer, dict[str, torch.Tensor]]:
    """The optimizer, and weights and states with the tensors joined again."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, COUNT, generator=generator)
    parameters = [torch.nn.Parameter(part.clone()) for part in draw().split(sizes)]

    def made() -> Optimizer:
        optimizer = make(parameters, fused=fused)
        return padded_fused(optimizer) if aligned else optimizer

    optimizer = made()
    for step in range(STEPS):
        if step == resumed_at:
            saved, optimizer = optimizer.state_dict(), made()
            optimizer.load_state_dict(saved)
        for parameter, gradient in zip(parameters, draw().split(sizes), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    found: dict[str, Any] = {"weights": torch.cat([p.detach() for p in parameters])}
    states = list(optimizer.state_dict()["state"].values())
    assert len(states) in (0, len(parameters))
    for name in states[0] if states else ():
        values = [state[name] for state in states if state[name] is not None]
        found |= {name: values[0] if name == "step" else torch.cat(values)} if values else {}
    return optimizer, found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", MADE)
def test_the_bits_do_not_depend_on_the_division_and_the_result_is_that_of_torch(name):
    _, whole = trained(MADE[name], [COUNT])
    _, expected = trained(MADE[name], [COUNT], fused=False, aligned=False)
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
    names = [
        name
        for name, make in MADE.items()
        if not equal(trained(make, [COUNT], aligned=False)[1], trained(make, CUTS[2], aligned=False)[1])
    ]
    assert names


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
