"""Callbacks: each observes one thing. Configs name those imported here; build_trainer.py adds the others.

A callback's `report_metrics() -> dict` adds metrics to report.json; `report_panels() -> list` adds panels to
report.html, and makes the callback see the test.
"""

from lockstep.callbacks.stopping import EarlyStopping as EarlyStopping
from lockstep.callbacks.stopping import FiniteLoss as FiniteLoss
from lockstep.callbacks.summary import Throughput as Throughput
from lockstep.callbacks.weights import EMA as EMA
from lockstep.callbacks.weights import Freeze as Freeze
