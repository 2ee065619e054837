"""The CUDA version and the GPU architectures that the installed torch was built for, without importing it, which takes seconds.

torch 2.13 states both only to those who import it (`torch.version.cuda`, `torch.cuda.get_arch_list()`). They are read from its
files, in 0.02 s. None where they cannot be found: the driver is believed then. Remove this file when tests/compat/test_torch_build.py
finds that torch is imported in less than half a second, or change it when that test finds other answers than torch's.
"""

import mmap
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

CUDA = re.compile(r"^cuda\b.*= *(?:None|['\"]([\d.]+)['\"])", re.MULTILINE)
ARCHITECTURES = re.compile(rb"\0((?:(?:sm|compute)_\d+[a-z]? ?)+)\0")


def folder() -> Path | None:
    found = find_spec("torch")
    return Path(found.origin).parent if found and found.origin else None


@cache
def cuda_version() -> str | None:
    """`13.0`; empty for a build without CUDA."""
    file = (folder() or Path()) / "version.py"
    found = CUDA.search(file.read_text()) if file.is_file() else None
    return found and (found[1] or "")


@cache
def architectures() -> list[str] | None:
    """`[sm_75, sm_80, ...]`."""
    library = next((folder() or Path()).glob("lib/*torch_python.*"), None)
    if library is None:
        return None
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = content.find(b"\0sm_")
        while at >= 0:
            if found := ARCHITECTURES.match(content, at):
                return found[1].decode().split()
            at = content.find(b"\0sm_", at + 1)
    return None
