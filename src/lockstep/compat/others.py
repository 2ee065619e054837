"""torchmetrics without scipy and matplotlib. Import this before Lightning, which imports torchmetrics.

torchmetrics 1.9.0 imports both where they are installed: scipy to put back one function that SRMRpy needs, and matplotlib for
`Metric.plot`. Without them `import lightning.pytorch`, after torch and torchvision, takes 0.4 s of CPU time instead of 1.6 (two runs each,
on two busy cores), and each process has 87 MiB less. Only torchmetrics' own question whether they are installed is answered "no", and only while it is imported. The first
`Metric.plot` loads matplotlib. Remove this file when torchmetrics imports neither by itself:
tests/compat/test_others.py::test_torchmetrics_still_imports_both fails then.
"""

import importlib
import importlib.util
import sys
from unittest.mock import patch

from lightning_utilities.core import imports

LATER = ("scipy", "matplotlib")


class Later(imports.RequirementCache):
    """Missing while torchmetrics is imported, installed when its functions ask again."""

    importing, plots = True, False

    def __bool__(self) -> bool:
        if Later.importing and self.requirement in LATER:
            return False
        if self.requirement == "matplotlib" and not self.plots:
            self.plots = True
            importlib.reload(sys.modules["torchmetrics.utilities.plot"])  # with matplotlib now, in the same module
        return super().__bool__()


# Users may have imported torchmetrics before. gammatone comes with SRMRpy.
if "torchmetrics" not in sys.modules and not importlib.util.find_spec("gammatone"):
    is_installed = imports.package_available
    with patch.multiple(
        imports, RequirementCache=Later, package_available=lambda name: name not in LATER and is_installed(name)
    ):
        import torchmetrics  # noqa: F401
    Later.importing = False
