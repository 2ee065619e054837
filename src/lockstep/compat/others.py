"""Private names of torchmetrics and huggingface_hub, each with the reason, and when it can go. Import this before Lightning, which imports torchmetrics."""

import importlib
import importlib.util
import os
import socket
import sys
from urllib.parse import urlsplit

from lightning_utilities.core import imports

# --- torchmetrics without scipy and matplotlib ---
#
# torchmetrics 1.9.0 imports both where they are installed: scipy to put back one function that SRMRpy needs, and matplotlib for
# `Metric.plot`. Without them `import lightning.pytorch` took 17.4 s of CPU time instead of 22.8 and 87 MiB less in each process
# (medians of three alternating runs on two busy cores). Only torchmetrics' own question whether they are installed is answered "no",
# and only while it is imported: for all others scipy and matplotlib stay as they are. The first `Metric.plot` loads matplotlib.
# Remove this when torchmetrics imports neither by itself: tests/compat/test_others.py::test_torchmetrics_still_imports_both fails then.

LATER = ("scipy", "matplotlib")
importing = False
package_available, RequirementCache = imports.package_available, imports.RequirementCache


def available_now(name: str) -> bool:
    return not (importing and name in LATER) and bool(package_available(name))


class Later(imports.RequirementCache):
    """Of LATER torchmetrics finds a package missing while it is imported, and installed when its functions ask again."""

    plots = False

    def __bool__(self) -> bool:
        if importing and self.requirement in LATER:
            return False
        if self.requirement == "matplotlib" and not self.plots:
            self.plots = True
            importlib.reload(sys.modules["torchmetrics.utilities.plot"])  # with matplotlib now, in the same module
        return super().__bool__()


# Users may have imported torchmetrics before. gammatone comes with SRMRpy.
if "torchmetrics" not in sys.modules and not importlib.util.find_spec("gammatone"):
    importing = True
    vars(imports).update(package_available=available_now, RequirementCache=Later)
    try:
        import torchmetrics  # noqa: F401
    finally:
        importing = False
        vars(imports).update(package_available=package_available, RequirementCache=RequirementCache)


# --- The Hugging Face hub without a network: an answer at once ---
#
# huggingface_hub 2.4 retries for half a minute where there is no network. It reads HF_HUB_OFFLINE when it is imported, and offers
# no function to go offline later. Remove this when it has one, or when it reads the variable at each request:
# tests/compat/test_others.py::test_the_variable_alone_comes_too_late fails then.

TIMEOUT_S = 3


def go_offline_without_network() -> None:
    """Makes huggingface_hub look into its cache only, if its server cannot be reached."""
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=TIMEOUT_S).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
        if "huggingface_hub.constants" in sys.modules:
            vars(sys.modules["huggingface_hub.constants"])["HF_HUB_OFFLINE"] = True
