"""A project that depends on Lockstep, as small as it can be: for tests."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TRAIN = """from lockstep import launch

JOB = launch.job("train")

if __name__ == "__main__":
    launch.main(JOB)
"""
NET = """from torch import nn

class Tulip(nn.Sequential):
    def __init__(self, name, in_channels, num_classes, image_size, width=2):
        super().__init__(nn.Conv2d(in_channels, width, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(num_classes))
        self(__import__("torch").zeros(1, in_channels, image_size, image_size))
"""
FILES = {
    "pyproject.toml": "[project]\nname = 'bouquet'\n\n[tool.lockstep]\n",
    "train.py": TRAIN,
    "configs/model/tulip.yaml": "_target_: bouquet.net.Tulip\nname: tulip\nwidth: 3\n",
    "configs/experiment/garden.yaml": "# @package _global_\ndefaults:\n  - override /model: basic_net\nseed: 8\n",
    "configs/project.yaml": (
        "defaults:\n  - lockstep\n  - override model: tulip\n  - override data: mnist\n  - _self_\nseed: 7\noptim:\n  lr: 5e-3\n"
        "trainer:\n  accelerator: cpu\n"
    ),
    "src/bouquet/net.py": NET,
}


def package(name: str) -> dict[str, str]:
    """A file of tests/packages as a package of the project, whose classes configs may name."""
    return {f"src/{name}/__init__.py": (Path(__file__).parent / f"packages/{name}.py").read_text()}


def write(root: Path, **more: str) -> Path:
    for name, text in {**FILES, **more}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@contextmanager
def entered(root: Path, package: str, **files: str) -> Iterator[Path]:
    """The folder of a project with `package`, which this process works in and imports from."""
    from lockstep.config.project import make_importable

    write(root, **files)
    (root / "configs/project.yaml").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.syspath_prepend(str(root / "src"))
        make_importable()
        yield root
    sys.modules.pop(package, None)
