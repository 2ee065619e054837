"""Callbacks: each observes one thing.

A method `report_figures() -> dict` adds figures to report.json; `report_panels() -> list` adds panels to report.html.
"""

from lockstep.callbacks.clock import Clock
from lockstep.callbacks.digests import Digests
from lockstep.callbacks.early_stopping import EarlyStopping
from lockstep.callbacks.ema import EMA
from lockstep.callbacks.finite_loss import FiniteLoss
from lockstep.callbacks.first_batch import FirstBatch
from lockstep.callbacks.foreign import Foreign
from lockstep.callbacks.freeze import Freeze
from lockstep.callbacks.monitored import Monitored
from lockstep.callbacks.plan import Plan
from lockstep.callbacks.preemption import Preemption
from lockstep.callbacks.progress import PassProgress, Progress
from lockstep.callbacks.progressive_resize import ProgressiveResize
from lockstep.callbacks.pruning import Pruning
from lockstep.callbacks.step_seed import StepSeed
from lockstep.callbacks.task_collectives import TaskCollectives
from lockstep.callbacks.throughput import Throughput
from lockstep.callbacks.timer import Timer
from lockstep.callbacks.watch import Watch

__all__ = [
    "EMA",
    "Clock",
    "Digests",
    "EarlyStopping",
    "FiniteLoss",
    "FirstBatch",
    "Foreign",
    "Freeze",
    "Monitored",
    "PassProgress",
    "Plan",
    "Preemption",
    "Progress",
    "ProgressiveResize",
    "Pruning",
    "StepSeed",
    "TaskCollectives",
    "Throughput",
    "Timer",
    "Watch",
]
