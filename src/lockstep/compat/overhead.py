"""What Lightning does at each step that these runs have no use for, left out. The rest is the step's own work.

Measured with a network of one layer, on a CPU: benchmarks/overhead.py.
"""

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler


class NoProfiler(PassThroughProfiler):
    """Lightning asks its profiler for a context 70 times a step; the one that does nothing makes a generator each time."""

    context: Any = nullcontext()

    def profile(self, action_name: str) -> Any:
        return self.context


def without_sigterm_broadcast(trainer: pl.Trainer) -> None:
    """Lightning 2.6 asks rank 0 at each step by a broadcast whether it was told to end, and waits for the answer with an
    `.item()`: GPUs run dry at each step. callbacks/preemption.py agrees on that once a second, so nobody is told that way.

    A patch of a private method, for there is no switch. Drop it when Lightning has one; tests/compat/test_overhead.py fails when
    the method is gone.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
