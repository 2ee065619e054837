"""Callbacks: each observes one thing. A method `report_figures() -> dict` adds figures to report.json."""

from lockstep.callbacks.early_stopping import EarlyStopping
from lockstep.callbacks.ema import EMA
from lockstep.callbacks.finite_loss import FiniteLoss
from lockstep.callbacks.foreign import Foreign
from lockstep.callbacks.plan import Plan
from lockstep.callbacks.preemption import Preemption
from lockstep.callbacks.progress import Progress
from lockstep.callbacks.pruning import Pruning
from lockstep.callbacks.step_seed import StepSeed
from lockstep.callbacks.throughput import Throughput
from lockstep.callbacks.timer import Timer
from lockstep.callbacks.watch import Watch

__all__ = [
    "EMA",
    "EarlyStopping",
    "FiniteLoss",
    "Foreign",
    "Plan",
    "Preemption",
    "Progress",
    "Pruning",
    "StepSeed",
    "Throughput",
    "Timer",
    "Watch",
]
