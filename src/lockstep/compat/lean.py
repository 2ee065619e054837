"""Imports Lightning without what it takes along and nothing here uses: scipy and matplotlib, 3 of 10 s and 87 MiB a process.

Lightning imports all of torchmetrics, which imports both where they are installed: for metrics of sound, and for `Metric.plot`.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

UNUSED = ("scipy", "matplotlib")
# What torchmetrics imports where it is installed, and may itself import scipy without asking.
OPTIONAL = ("torch_fidelity", "vmaf_torch", "librosa", "pesq", "pystoi", "gammatone")


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Lets what is imported meanwhile find that UNUSED is not installed; afterwards it is again.

    What a program has imported before stays. torchmetrics' functions that need scipy import it when they are called, as ever;
    `Metric.plot` alone goes on to say that matplotlib is not installed: who wants it imports torchmetrics before `lockstep`.
    """
    from lightning_utilities.core import imports as asked

    loaded: dict[str, Any] = sys.modules
    requirements: Any = asked.RequirementCache
    hidden = [name for name in UNUSED if name not in loaded]
    check, denied = getattr(requirements, "_check_available", None), []
    if "torchmetrics" in loaded or not hidden or check is None or any(map(importlib.util.find_spec, OPTIONAL)):
        yield
        return

    def deny(self: Any) -> None:
        if self.requirement in hidden and not hasattr(self, "available"):
            self.available, self.message = False, f"{self.requirement} is left out by lockstep/lean.py"
            denied.append(self)
        check(self)

    requirements._check_available = deny
    loaded.update(dict.fromkeys(hidden))  # None: an import fails, and there is no spec to be found
    try:
        yield
    finally:
        requirements._check_available = check
        asked.package_available.cache_clear()
        for name in hidden:
            del loaded[name]
        for asker in denied:
            if asker.requirement != "matplotlib":  # torchmetrics has bound what it plots with by now
                del asker.available
