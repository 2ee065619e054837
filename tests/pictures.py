"""Small image files, made here, in colours that a network can tell apart in seconds."""

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"blue": (40, 40, 200), "green": (40, 200, 40), "red": (200, 40, 40)}


def picture(colour: tuple[int, int, int], seed: int) -> Image.Image:
    """An RGB image of 10 to 29 pixels a side."""
    random = np.random.default_rng(seed)
    height, width = random.integers(10, 30, 2)
    noise = random.integers(-40, 40, (height, width, 3))
    return Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8))


def write_pictures(folder: Path, colour: str, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        ending = ("png", "jpg")[number % 2]
        picture(COLOURS[colour], len(colour) + 100 * number).save(folder / f"{number}.{ending}")


def write_classes(root: Path, count: int) -> Path:
    """`root` with a folder of `count` images for each colour."""
    for colour in COLOURS:
        write_pictures(root / colour, colour, count)
    return root
