"""Provenance of a run: commit, versions, memory."""

import platform
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from lockstep import ROOT, WHEEL
from lockstep.config import project

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch

PACKAGES = ("lockstep", "torch", "lightning", "torchvision", "timm", "hydra-core", "numpy")


def git_sha() -> str | None:
    """The commit of the project, else of Lockstep's checkout, with `-dirty` if files were changed since; None without git."""
    root = project.current().root or (None if WHEEL else ROOT)
    if root is None:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


@cache  # asked at every checkpoint; reading the packages' metadata takes 30 ms
def versions() -> str:
    found = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


def peak_bytes(device: "torch.device") -> int | None:
    """The most memory that this process has had so far: of its GPU if it has one, else of the host."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_memory_bytes(trainer: "pl.Trainer") -> int | None:
    """That of the process with the most. Call it on all ranks."""
    import torch

    device = trainer.strategy.root_device
    peak = peak_bytes(device)
    if peak is None:
        return None
    return int(trainer.strategy.reduce(torch.tensor(float(peak), device=device), reduce_op="max"))
