"""Runs Lightning's own tests with Lockstep's strategy `single`, wherever a test does not choose a strategy.

Check out Lightning's repository, install pytest and Lightning's test requirements, and run in its folder tests:

    PYTHONPATH=<lockstep>/benchmarks:. python -m pytest -p lightnings_tests tests_pytorch/loops tests_pytorch/core

With LIGHTNINGS_OWN=1, the tests use Lightning's strategies, for comparison. docs/measurements/theirs.md has the results.
"""

import os
from functools import wraps
from typing import Any

import lightning.pytorch as pl

from lockstep.strategies import SingleDevice

init = pl.Trainer.__init__
OPEN = {
    "strategy": ("auto",),
    "accelerator": ("auto", "cpu"),
    "devices": ("auto", 1, "1"),
    "num_nodes": (1,),
    "plugins": (None,),
}


@wraps(init)
def with_ours(self: pl.Trainer, **kwargs: Any) -> None:
    if all(kwargs.get(name, values[0]) in values for name, values in OPEN.items()):
        kwargs |= {"strategy": SingleDevice(), "accelerator": "cpu"}
    init(self, **kwargs)


if not os.environ.get("LIGHTNINGS_OWN"):
    pl.Trainer.__init__ = with_ours  # type: ignore[method-assign]
