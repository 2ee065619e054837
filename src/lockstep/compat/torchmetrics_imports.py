"""Imports torchmetrics without scipy and matplotlib. Import this module before Lightning, which imports torchmetrics.

torchmetrics 1.9.0 imports both where they are installed: scipy to put back one function that SRMRpy needs, and matplotlib for
`Metric.plot`. Without them `import lightning.pytorch` took 17.4 s of CPU time instead of 22.8 and 87 MiB less in each process
(medians of three alternating runs on two busy cores). Only torchmetrics' own question whether they are installed is answered "no",
and only while it is imported: for all others scipy and matplotlib stay as they are. The first `Metric.plot` loads matplotlib.
Remove this file when torchmetrics imports neither by itself: tests/compat/test_torchmetrics_imports.py fails then.
"""

import importlib
import importlib.util
import sys
from typing import Any

from lightning_utilities.core import imports

LATER = ("scipy", "matplotlib")
importing = False
package_available, RequirementCache = imports.package_available, imports.RequirementCache


def available_now(name: str) -> bool:
    return not (importing and name in LATER) and bool(package_available(name))


class Later(imports.RequirementCache):
    """A package that torchmetrics finds missing while it is imported, and installed when its functions ask again."""

    plots = False

    def __bool__(self) -> bool:
        if importing:
            return False
        if self.requirement == "matplotlib" and not self.plots:
            self.plots = True
            importlib.reload(sys.modules["torchmetrics.utilities.plot"])  # with matplotlib now, in the same module
        return super().__bool__()


def requirement(name: str | None = None, module: str | None = None) -> Any:
    return Later(name) if name in LATER else RequirementCache(name, module)


def import_torchmetrics() -> None:
    global importing
    importing = True
    vars(imports).update(package_available=available_now, RequirementCache=requirement)
    try:
        import torchmetrics  # noqa: F401
    finally:
        importing = False
        vars(imports).update(package_available=package_available, RequirementCache=RequirementCache)


# Users may have imported torchmetrics before. gammatone comes with SRMRpy.
if "torchmetrics" not in sys.modules and not importlib.util.find_spec("gammatone"):
    import_torchmetrics()
