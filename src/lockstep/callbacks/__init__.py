"""Callbacks: each observes one thing.

A method `report_figures() -> dict` adds figures to report.json; `report_panels() -> list` adds panels to report.html.
"""

from lockstep.callbacks.custom_module import CustomModule as CustomModule
from lockstep.callbacks.digests import Digests as Digests
from lockstep.callbacks.ema import EMA as EMA
from lockstep.callbacks.freeze import Freeze as Freeze
from lockstep.callbacks.preemption import Preemption as Preemption
from lockstep.callbacks.step_seed import StepSeed as StepSeed
from lockstep.callbacks.stopping import EarlyStopping as EarlyStopping
from lockstep.callbacks.stopping import FiniteLoss as FiniteLoss
from lockstep.callbacks.stopping import Monitored as Monitored
from lockstep.callbacks.stopping import TaskCollectives as TaskCollectives
from lockstep.callbacks.stopping import Timer as Timer
from lockstep.callbacks.summary import FirstBatch as FirstBatch
from lockstep.callbacks.summary import PassProgress as PassProgress
from lockstep.callbacks.summary import Plan as Plan
from lockstep.callbacks.summary import Progress as Progress
from lockstep.callbacks.timing import Clock as Clock
from lockstep.callbacks.timing import Throughput as Throughput
from lockstep.callbacks.watch import Watch as Watch
