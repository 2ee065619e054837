"""The 5,000 MNIST images from a dependency, until this project has its own data."""

from pathlib import Path


def overrides(folder: Path) -> list[str]:
    return ["data.source=embedded", f"data.cache_dir={folder}", "model.width=4"]
