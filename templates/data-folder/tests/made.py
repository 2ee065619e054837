"""Writes a small folder of images: two classes that differ in brightness. `uv run tests/made.py` writes it to data/."""

from pathlib import Path

import numpy as np
from PIL import Image


def overrides(folder: Path) -> list[str]:
    random = np.random.default_rng(0)
    for name, light in (("dark", 60), ("light", 180)):
        (folder / name).mkdir(parents=True)
        for i in range(60):
            pixels = random.integers(light - 50, light + 50, (20, 24, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return [f"data.root={folder}", f"data.cache_dir={folder}-cache", "data.image_size=16", "model.width=4"]


if __name__ == "__main__":
    overrides(Path("data"))
