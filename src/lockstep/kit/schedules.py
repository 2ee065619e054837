"""Learning-rate schedules. Each takes the optimizer and the run's total number of optimizer steps."""

import math
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lockstep import UserError


def with_warmup(
    optimizer: Optimizer, total_steps: float, warmup_steps: float, shape: Callable[[float], float] | None = None
) -> LambdaLR:
    """Linear warm-up to optim.lr, then the schedule given by `shape`. A float in `warmup_steps` is a fraction of the run.

    `shape` maps the progress from 0 to 1 to a factor of optim.lr. Without `shape`, the factor is 1.
    """
    if math.isinf(total_steps) and (shape or isinstance(warmup_steps, float)):
        raise UserError(
            "the schedule needs the run's number of steps. Set trainer.max_epochs=<n> or trainer.max_steps=<n>, or schedule=constant."
        )
    warmup_steps = round(warmup_steps * total_steps) if isinstance(warmup_steps, float) else warmup_steps
    if warmup_steps >= total_steps:
        raise UserError(
            f"schedule.warmup_steps={warmup_steps} must be below the run's {total_steps:g} steps. Set a smaller number."
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        return shape(min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))) if shape else 1.0

    return LambdaLR(optimizer, factor)


def constant(optimizer: Optimizer, total_steps: float, *, warmup_steps: float = 0) -> LambdaLR:
    return with_warmup(optimizer, total_steps, warmup_steps)


def cosine(optimizer: Optimizer, total_steps: float, *, warmup_steps: float = 0, final_fraction: float = 0) -> LambdaLR:
    """Loshchilov and Hutter, "SGDR" (2017), without restarts."""
    low = final_fraction
    return with_warmup(
        optimizer, total_steps, warmup_steps, lambda t: low + (1 - low) * (1 + math.cos(math.pi * t)) / 2
    )


def linear(optimizer: Optimizer, total_steps: float, *, warmup_steps: float = 0, final_fraction: float = 0) -> LambdaLR:
    return with_warmup(optimizer, total_steps, warmup_steps, lambda t: 1 - (1 - final_fraction) * t)


def exponential(
    optimizer: Optimizer,
    total_steps: float,
    *,
    warmup_steps: float = 0,
    initial_fraction: float = 1.0,
    final_fraction: float = 0.01,
) -> LambdaLR:
    """The learning rate changes by the same factor in each step."""
    if not (initial_fraction > 0 and final_fraction > 0):
        raise UserError("schedule.initial_fraction and schedule.final_fraction must be above 0, for example 0.001.")
    return with_warmup(optimizer, total_steps, warmup_steps, lambda t: initial_fraction ** (1 - t) * final_fraction**t)


def step(
    optimizer: Optimizer,
    total_steps: float,
    *,
    warmup_steps: float = 0,
    milestones: Sequence[float] = (),
    gamma: float = 0.1,
) -> LambdaLR:
    """Multiplies the rate by `gamma` at each milestone, a fraction of the run."""
    return with_warmup(optimizer, total_steps, warmup_steps, lambda t: float(gamma ** sum(t >= m for m in milestones)))
