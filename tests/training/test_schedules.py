"""Learning rates over a run: where they begin, where they end, and what lies between."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler

from lockstep.errors import UserError
from lockstep.training import schedules

LR, TOTAL = 0.5, 20
FINITE = [schedules.cosine, schedules.linear, schedules.exponential, schedules.step]


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
    (schedules.step, {}, [1.0] * (TOTAL + 1)),
    (schedules.step, {"milestones": [0.5, 0.75], "gamma": 0.1}, [1.0] * 10 + [0.1] * 5 + [0.01] * 6),
    (schedules.step, {"milestones": (0.9, 0.2), "gamma": 0.5}, [1.0] * 4 + [0.5] * 14 + [0.25] * 3),  # in any order
])  # fmt: skip
def test_a_run_has_the_whole_shape_after_warm_up_and_its_last_rate_from_then_on(schedule, args, expected):
    seen = rates(schedule, total=TOTAL + 4, steps=TOTAL + 9, warmup_steps=4, **args)
    assert seen[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert seen[4:-5] == pytest.approx(expected, abs=1e-12)
    assert seen[-5:] == pytest.approx(expected[-1:] * 5, abs=1e-12)
    assert rates(schedule, **args)[0] == expected[0]


@pytest.mark.parametrize("schedule", FINITE)
def test_a_schedule_that_ends_needs_a_run_that_ends(schedule):
    with pytest.raises(UserError, match=r"trainer\.max_epochs=<n> or trainer\.max_steps=<n>, or schedule=constant"):
        rates(schedule, total=math.inf)


def test_a_constant_rate_needs_no_end():
    seen = rates(schedules.constant, total=math.inf, steps=5, warmup_steps=2)
    assert seen == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])


@pytest.mark.parametrize("schedule", [schedules.constant, *FINITE])
def test_warm_up_as_long_as_the_run_is_refused(schedule):
    with pytest.raises(UserError, match=rf"schedule\.warmup_steps={TOTAL} .* {TOTAL} steps"):
        rates(schedule, warmup_steps=TOTAL)


def test_an_exponential_rate_cannot_begin_or_end_at_zero():
    with pytest.raises(UserError, match="must be above 0"):
        rates(schedules.exponential, final_fraction=0.0)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (partial(lr_scheduler.StepLR, step_size=5), {}),
        (partial(lr_scheduler.OneCycleLR, max_lr=0.5), {"total_steps": TOTAL}),
        (partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=30), {}),
    ],
)
def test_only_schedules_that_ask_are_told_how_long_the_run_is(make, given):
    wrapped = partial(schedules.scheduler, make)
    assert rates(wrapped, steps=10) == rates(lambda optimizer, _: make(optimizer, **given), steps=10)
