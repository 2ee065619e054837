"""The rules of the layout that a reader relies on."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep import ROOT

SOURCE = ROOT / "src/lockstep"
PACKAGES = {"data", "models", "strategies", "callbacks", "launch"}
JOINS = {"build.py"}
WITHOUT_TORCH = (
    "__init__",
    "errors",
    "schema",
    "config",
    "world",
    "report",
    "report_html",
    "data.prepare",
    "data.files",
    "data.sampler",
)
HEAVY = {"torch", "lightning", "torchvision", "torchmetrics", "timm", "wandb", "matplotlib"}


def imports(path: Path, *, top: bool = False) -> Iterator[str]:
    """Modules that a file imports; with `top`, only those that are imported when the file is."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "lockstep" and parts[1] in PACKAGES else None


@pytest.mark.parametrize("path", sorted(SOURCE.glob("*/*.py")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_packages_do_not_import_each_other_sideways(path):
    own = path.parent.name
    sideways = {package(module) for module in imports(path, top=True)} - {None, own}
    assert not sideways


def test_the_network_and_the_task_know_no_device():
    words = {"cuda", "device", "rank", "world_size"}
    for path in [SOURCE / "task.py", *(SOURCE / "models").glob("*.py")]:
        tree = ast.parse(path.read_text())
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | {
            n.id for n in ast.walk(tree) if isinstance(n, ast.Name)
        }
        assert not names & words, path


@pytest.mark.parametrize(
    "module", [*WITHOUT_TORCH, *(f"launch.{path.stem}" for path in (SOURCE / "launch").glob("*.py"))]
)
def test_what_runs_before_the_config_is_checked_imports_nothing_heavy(module):
    path = SOURCE / f"{module.replace('.', '/')}.py"
    assert not {name.split(".")[0] for name in imports(path, top=True)} & HEAVY


def test_files_are_short_enough_to_be_read():
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 250, path
