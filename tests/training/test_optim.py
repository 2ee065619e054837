"""Groups of parameters, equal to timm's for timm's networks and by order for others; learning rates over a run."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn
from torch.optim import lr_scheduler

from lockstep.errors import UserError
from lockstep.kit import schedules
from lockstep.training import optim

# --- Groups of parameters ---


def by_parameter(groups, lr: float) -> dict[int, tuple[float, float]]:
    """Rate and decay of each parameter; timm gives rates as factors."""
    return {
        id(p): (group["lr"] if "lr" in group else lr * group.get("lr_scale", 1.0), group["weight_decay"])
        for group in groups
        for p in group["params"]
    }


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext"])
def test_groups_of_timms_networks_are_timms(name):
    net = timm.create_model(name, num_classes=7)
    assert optim.head_of(net) is net.get_classifier()  # of other networks, the last layer
    spared = net.no_weight_decay() if hasattr(net, "no_weight_decay") else ()
    own = optim.groups(net, lr=0.1, weight_decay=0.05, no_decay=True, layer_decay=0.75)
    expected = param_groups_layer_decay(net, weight_decay=0.05, layer_decay=0.75, no_weight_decay_list=spared)
    found, wanted = by_parameter(own, 0.1), by_parameter(expected, 0.1)
    assert found.keys() == wanted.keys() == {id(p) for p in net.parameters()}
    assert all(found[p] == pytest.approx(wanted[p]) for p in wanted)
    expected = param_groups_weight_decay(net, weight_decay=0.05, no_weight_decay_list=spared)
    assert by_parameter(optim.groups(net, lr=0.1, weight_decay=0.05, no_decay=True), 0.1) == by_parameter(expected, 0.1)  # fmt: skip


def test_layers_of_other_networks_are_their_blocks_in_order():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 3))
    net.register_parameter("scale", nn.Parameter(torch.ones(1)))
    found = by_parameter(optim.groups(net, lr=1.0, layer_decay=0.5, head_lr=9.0), 1.0)
    rates = {name: found[id(p)][0] for name, p in net.named_parameters() if not name.endswith("bias")}
    assert rates == {"scale": 0.125, "0.weight": 0.125, "2.0.weight": 0.25, "2.1.weight": 0.5, "3.weight": 9.0}


def test_parameters_of_a_module_beside_its_network_are_trained_too():
    net, own = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Parameter(torch.ones(1))
    found = by_parameter(optim.groups(net, [*net.parameters(), own], lr=1.0, layer_decay=0.5), 1.0)
    assert (found[id(own)][0], found[id(net[0].weight)][0]) == (1.0, 0.5)


# --- Momentum ---


@pytest.mark.parametrize("nesterov", [False, True])
def test_fused_sgd_takes_parameters_whose_first_gradient_comes_later(nesterov):
    def trained(fused: bool) -> list[list[float]]:
        first, late, never = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
        made = torch.optim.SGD([first, late, never], 0.1, 0.9, weight_decay=0.1, nesterov=nesterov, fused=fused)
        for step in range(4):
            first.grad, late.grad = torch.full((3,), step + 1.0), torch.ones(3) if step > 1 else None
            optim.begin_momentum(made)
            made.step()
        return [p.tolist() for p in (first, late, never)]

    assert trained(fused=True) == [pytest.approx(values) for values in trained(fused=False)]


def test_a_first_step_whose_gradients_overflow_leaves_a_momentum_of_zeros():
    weight = torch.nn.Parameter(torch.ones(3))
    made = torch.optim.SGD([weight], 0.1, 0.9, fused=True)
    weight.grad, made.grad_scale, made.found_inf = torch.full((3,), torch.inf), torch.ones(1), torch.ones(1)
    optim.begin_momentum(made)
    made.step()
    assert weight.tolist() == [1.0] * 3
    assert made.state[weight]["momentum_buffer"].tolist() == [0.0] * 3


# --- Schedules ---

LR, TOTAL = 0.5, 20


def rates(schedule, total: float = TOTAL, steps: int = TOTAL, **args) -> list[float]:
    """The rate of each optimizer step, as a fraction of optim.lr, and the rate that a step after the last would have."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = schedule(optimizer, total, **args)
    seen = []
    for _ in range(steps + 1):
        seen.append(optimizer.param_groups[0]["lr"] / LR)
        optimizer.step()
        scheduler.step()
    return seen


def over(shape: Callable[[float], float]) -> list[float]:
    return [shape(step / TOTAL) for step in range(TOTAL + 1)]


@pytest.mark.parametrize(("schedule", "args", "expected"), [
    (schedules.constant, {}, [1.0] * (TOTAL + 1)),
    (schedules.cosine, {}, over(lambda t: (1 + math.cos(math.pi * t)) / 2)),
    (schedules.cosine, {"final_fraction": 0.2}, over(lambda t: 0.6 + 0.4 * math.cos(math.pi * t))),
    (schedules.linear, {"final_fraction": 0.2}, over(lambda t: 1 - 0.8 * t)),
    (schedules.exponential, {}, over(lambda t: 0.01 ** t)),
    (schedules.exponential, {"initial_fraction": 1e-3, "final_fraction": 1.0}, over(lambda t: 0.001 ** (1 - t))),
    (schedules.step, {"milestones": [0.5, 0.75], "gamma": 0.1}, [1.0] * 10 + [0.1] * 5 + [0.01] * 6),
    (schedules.step, {"milestones": (0.9, 0.2), "gamma": 0.5}, [1.0] * 4 + [0.5] * 14 + [0.25] * 3),  # in any order
])  # fmt: skip
def test_a_run_has_the_whole_shape_after_warm_up_and_its_last_rate_from_then_on(schedule, args, expected):
    seen = rates(schedule, total=TOTAL + 4, steps=TOTAL + 9, warmup_steps=4, **args)
    assert seen[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert seen[4:-5] == pytest.approx(expected, abs=1e-12)
    assert seen[-5:] == pytest.approx(expected[-1:] * 5, abs=1e-12)
    assert rates(schedule, **args)[0] == expected[0]


def test_a_constant_rate_needs_no_end():
    seen = rates(schedules.constant, total=math.inf, steps=5, warmup_steps=2)
    assert seen == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])


def test_a_warm_up_below_one_is_a_fraction_of_the_run():
    for schedule in (schedules.constant, *FINITE):
        assert rates(schedule, warmup_steps=0.2) == rates(schedule, warmup_steps=TOTAL // 5)
    with pytest.raises(UserError, match=NO_END):
        rates(schedules.constant, total=math.inf, warmup_steps=0.2)


FINITE = [schedules.cosine, schedules.linear, schedules.exponential, schedules.step]
LONG_WARM_UP = rf"schedule\.warmup_steps={TOTAL} .* {TOTAL} steps"
NO_END = r"trainer\.max_epochs=<n> or trainer\.max_steps=<n>, or schedule=constant"


@pytest.mark.parametrize(("schedule", "args", "told"), [
    *((schedule, {"warmup_steps": TOTAL}, LONG_WARM_UP) for schedule in (schedules.constant, *FINITE)),
    *((schedule, {"total": math.inf}, NO_END) for schedule in FINITE),
    (schedules.exponential, {"final_fraction": 0.0}, "must be above 0"),
])  # fmt: skip
def test_a_shape_that_does_not_fit_into_the_run_is_refused(schedule, args, told):
    with pytest.raises(UserError, match=told):
        rates(schedule, **args)


@pytest.mark.parametrize(("make", "given"), [
    (partial(lr_scheduler.StepLR, step_size=5), {}),
    (partial(lr_scheduler.OneCycleLR, max_lr=0.5), {"total_steps": TOTAL}),
    (partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=30), {}),
])  # fmt: skip
def test_only_schedules_that_ask_are_told_how_long_the_run_is(make, given):
    wrapped = partial(optim.scheduler, make)
    assert rates(wrapped, steps=10) == rates(lambda optimizer, _: make(optimizer, **given), steps=10)
