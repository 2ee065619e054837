"""Learning rates over a run: where they begin, where they end, and what lies between."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from lockstep.errors import UserError
from lockstep.training import schedules

LR, TOTAL = 0.5, 20
DECAYING = [schedules.cosine, schedules.linear]
FINITE = [*DECAYING, schedules.step]


def rates(schedule, total: float = TOTAL, steps: int = TOTAL, **args) -> list[float]:
    """The rate of each optimizer step, as a share of optim.lr, and the rate that a step after the last would have."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = schedule(optimizer, total, **args)
    seen = []
    for _ in range(steps + 1):
        seen.append(optimizer.param_groups[0]["lr"] / LR)
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(("schedule", "args", "expected"), [
    (schedules.constant, {}, [1.0] * (TOTAL + 1)),
    (schedules.cosine, {}, [(1 + math.cos(math.pi * step / TOTAL)) / 2 for step in range(TOTAL + 1)]),
    (schedules.linear, {}, [1 - step / TOTAL for step in range(TOTAL + 1)]),
    (schedules.step, {}, [1.0] * (TOTAL + 1)),
    (schedules.step, {"milestones": [0.5, 0.75], "gamma": 0.1}, [1.0] * 10 + [0.1] * 5 + [0.01] * 6),
    (schedules.step, {"milestones": (0.9, 0.2), "gamma": 0.5}, [1.0] * 4 + [0.5] * 14 + [0.25] * 3),  # in any order
])  # fmt: skip
def test_shapes(schedule, args, expected):
    assert rates(schedule, **args) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("schedule", DECAYING)
@pytest.mark.parametrize("final", [0.0, 0.1, 0.5, 1.0])
def test_the_final_fraction_is_reached_at_the_end(schedule, final):
    seen = rates(schedule, final_fraction=final)
    assert seen[0] == 1.0
    assert seen[TOTAL // 2] == pytest.approx((1 + final) / 2)
    assert seen[TOTAL] == pytest.approx(final)


@pytest.mark.parametrize("schedule", DECAYING)
def test_after_the_end_the_rate_stays_at_its_final_fraction(schedule):
    assert rates(schedule, steps=TOTAL + 5, final_fraction=0.2)[TOTAL:] == pytest.approx([0.2] * 6)


@pytest.mark.parametrize("schedule", [schedules.constant, *FINITE])
def test_warm_up_rises_in_even_steps_to_the_full_rate(schedule):
    seen = rates(schedule, warmup_steps=4)
    assert seen[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("schedule", DECAYING)
def test_after_warm_up_the_rest_of_the_run_has_the_whole_shape(schedule):
    assert rates(schedule, warmup_steps=4)[4:] == pytest.approx(rates(schedule, total=TOTAL - 4, steps=TOTAL - 4))


@settings(max_examples=60, deadline=None)
@given(total=st.integers(1, 50), data=st.data(), schedule=st.sampled_from(DECAYING))
def test_rates_never_rise_after_warm_up_nor_leave_their_range(total, data, schedule):
    warmup, final = data.draw(st.integers(0, total - 1)), data.draw(st.floats(0, 1))
    seen = rates(schedule, total=total, steps=total, warmup_steps=warmup, final_fraction=final)
    assert all(0 <= rate <= 1 + 1e-12 for rate in seen)
    assert all(after <= before + 1e-12 for before, after in zip(seen[warmup:], seen[warmup + 1 :], strict=False))
    assert seen[warmup] == pytest.approx(1)


@pytest.mark.parametrize("schedule", FINITE)
def test_a_schedule_that_ends_needs_a_run_that_ends(schedule):
    with pytest.raises(UserError, match=r"trainer\.max_epochs=<n> or trainer\.max_steps=<n>, or schedule=constant"):
        rates(schedule, total=math.inf)


def test_a_constant_rate_needs_no_end():
    assert rates(schedules.constant, total=math.inf, steps=5, warmup_steps=2) == pytest.approx(
        [1 / 3, 2 / 3, 1, 1, 1, 1]
    )


@pytest.mark.parametrize("schedule", [schedules.constant, *FINITE])
@pytest.mark.parametrize("warmup", [TOTAL, TOTAL + 1])
def test_warm_up_as_long_as_the_run_is_refused(schedule, warmup):
    with pytest.raises(UserError, match=rf"schedule\.warmup_steps={warmup} .* {TOTAL} steps"):
        rates(schedule, warmup_steps=warmup)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (partial(lr_scheduler.StepLR, step_size=5), {}),
        (partial(lr_scheduler.ExponentialLR, gamma=0.5), {}),
        (partial(lr_scheduler.CosineAnnealingLR, T_max=10), {}),
        (partial(lr_scheduler.OneCycleLR, max_lr=0.5), {"total_steps": TOTAL}),
        (partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=30), {}),
    ],
)
def test_only_schedules_that_ask_are_told_how_long_the_run_is(make, given):
    wrapped = partial(schedules.scheduler, make)
    assert rates(wrapped, steps=10) == rates(lambda optimizer, _: make(optimizer, **given), steps=10)


def test_exponential_is_torchs_between_its_two_rates():
    expected = rates(lambda o, _: lr_scheduler.ExponentialLR(o, 0.01 ** (1 / TOTAL)))
    assert rates(schedules.exponential, final_fraction=0.01) == pytest.approx(expected)
    rising = rates(schedules.exponential, initial_fraction=1e-3, final_fraction=1.0)
    assert rising == pytest.approx([0.001 ** (1 - step / TOTAL) for step in range(TOTAL + 1)])
    with pytest.raises(UserError, match="must be above 0"):
        rates(schedules.exponential, final_fraction=0.0)
