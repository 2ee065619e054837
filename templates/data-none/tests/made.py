"""The 5,000 MNIST images that come with a dependency, until this project has data of its own."""

from pathlib import Path


def overrides(folder: Path) -> list[str]:
    return ["data.source=embedded", f"data.cache_dir={folder}", "model.width=4"]
