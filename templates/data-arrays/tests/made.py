"""Writes small arrays into the files that src/my_project/data.py reads: three classes that differ in brightness."""

from pathlib import Path

import numpy as np


def overrides(folder: Path) -> list[str]:
    random = np.random.default_rng(0)
    for part, count in (("train", 110), ("test", 31)):
        target = random.integers(0, 3, count)
        pixels = random.integers(0, 60, (count, 1, 16, 16)) + 90 * target[:, None, None, None]
        np.savez(folder / f"{part}.npz", input=np.minimum(pixels, 255).astype(np.uint8), target=target)
    return [f"data.root={folder}", "data.image_size=16", "model.width=4"]
