"""Imports torchmetrics without scipy and matplotlib. Import this before Lightning, which imports torchmetrics.

torchmetrics 1.9.0 imports both if they are installed: scipy to restore one function that SRMRpy needs, and matplotlib
for `Metric.plot`. Without them `import lightning.pytorch`, after torch and torchvision, takes 0.4 s of CPU time instead
of 1.6 (two runs each, on two busy cores), and each process uses 87 MiB less. Only torchmetrics' own check reports them
as missing, and only while it is imported. The first `Metric.plot` loads matplotlib. Remove this file when torchmetrics
imports neither on its own: tests/compat/test_others.py::test_torchmetrics_still_imports_both fails then.
"""

import importlib
import importlib.util
import sys
from unittest.mock import patch

from lightning_utilities.core import imports

LATER = ("scipy", "matplotlib")


class LazyImport(imports.RequirementCache):
    """Reports a library as missing while torchmetrics is imported, and as installed when its functions check again."""

    importing, plots = True, False

    def __bool__(self) -> bool:
        if LazyImport.importing and self.requirement in LATER:
            return False
        if self.requirement == "matplotlib" and not self.plots:
            self.plots = True
            importlib.reload(sys.modules["torchmetrics.utilities.plot"])  # now with matplotlib, in the same module
        return super().__bool__()


# Users may have imported torchmetrics already. gammatone comes with SRMRpy.
if "torchmetrics" not in sys.modules and not importlib.util.find_spec("gammatone"):
    is_installed = imports.package_available
    with patch.multiple(
        imports, RequirementCache=LazyImport, package_available=lambda name: name not in LATER and is_installed(name)
    ):
        import torchmetrics  # noqa: F401
    LazyImport.importing = False
