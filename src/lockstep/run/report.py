"""What the report of a run says: where the run comes from, and what was tested. Free of torch."""

import math
import platform
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may be built without libyaml
PACKAGES = ("lockstep", "torch", "lightning", "torchvision", "timm", "hydra-core", "numpy")
SEPARATOR = " | "  # of names in `evaluated`: values of report.json are neither lists nor dicts


@cache  # asked at every checkpoint; reading the packages' metadata takes 30 ms
def versions() -> str:
    installed = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed.append(f"{package} {version(package)}")
    return ", ".join(installed)


def provenance(root: Path | None) -> dict[str, Any]:
    """When and where a run starts, and from which code. `root`: the checkout of the project.

    The commit ends in `-dirty` if files were changed since; it is None without a checkout or without git.
    """
    command, sha = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], ""
    with suppress(OSError, subprocess.SubprocessError):
        sha = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10).strip() if root else ""
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"started": started, "host": socket.gethostname(), "git_sha": sha or None, "versions": versions()}


def tested(report: Mapping[str, Any]) -> list[str]:
    """The names of the test metrics, which a LightningModule may call as it likes."""
    return [name for name in str(report.get("evaluated", "")).split(SEPARATOR) if name in report]


def best_row(rows: Iterable[Mapping[str, float]], monitor: str | None, mode: str) -> dict[str, float]:
    """The validation metrics of the tested checkpoint: of the best by `monitor`, or of the last one without it."""
    sign = 1 if mode == "max" else -1

    def rank(row: Mapping[str, float]) -> tuple[float, ...]:
        """As that of ModelCheckpoint: NaN is the worst."""
        scores = (sign * row[monitor], -row.get("val/loss", 0.0)) if monitor else ()
        return *(-math.inf if math.isnan(score) else score for score in scores), row["step"]

    validated = [r for r in rows if (monitor in r if monitor else any(name.startswith("val/") for name in r))]
    best = max(validated, key=rank, default={})
    return {name: value for name, value in best.items() if name not in ("step", "epoch", "val/count")}


def metric_series(rows: Iterable[Mapping[str, float]]) -> dict[str, list[tuple[int, float]]]:
    """The columns of metrics.csv by name, each as pairs of step and value."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step":
                found.setdefault(name, []).append((int(row["step"]), value))
    return found
