"""Image files to bytes of one size, with Pillow. Free of torch.

A core decodes 157 images/s from 500 x 375 to 224 pixels, and 136 into the cache (docs/decoding.md).
"""

# B batch · C channel · H W pixel · N file

import hashlib
import io
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.pixels import refuse_numbers, to_array
from lockstep.machine.world import cores, rank_of

if TYPE_CHECKING:
    from PIL.Image import Image

AT_ONCE = 1024  # files queued per thread


def check(image: "Image") -> None:
    """Raises if the file is broken. Decodes a JPEG at an eighth of its size, which takes a quarter of the time."""
    refuse_numbers(image)
    image.draft("L", (1, 1))
    image.load()


def decoded_all(
    files: Sequence[Any], *, channels: int, size: int, problems: list[str] | None = None
) -> NDArray[np.uint8]:
    """image_BCHW of files, by their paths or opened. `problems` gets why a file cannot be read: its image is then black."""
    from PIL import Image

    image_BCHW = np.zeros((len(files), channels, size, size), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd EXIF data and palettes
        for place, file in enumerate(files):
            try:
                with Image.open(file) as image:
                    image_BCHW[place] = to_array(image, channels=channels, size=size)
            except Exception as e:  # Pillow raises nearly anything for a broken file
                if problems is None:
                    raise
                problems[place] = reason(e)
    return image_BCHW


def reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def as_bytes(texts: Iterable[str]) -> NDArray[np.bytes_]:
    """One array of bytes, because reference counts make workers copy a list of strings page by page."""
    return np.array([os.fsencode(text) for text in texts], dtype=np.bytes_)


class Files:
    """Image files and their targets, decoded on access, by workers."""

    def __init__(self, base: Path, paths: list[str], target_N: NDArray[Any], *, channels: int, size: int) -> None:
        self.base, self.paths = base, as_bytes(paths)
        self.target_N, self.channels, self.size = target_N, channels, size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, indices: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        files = [self.base / os.fsdecode(self.paths[index]) for index in indices]
        image_BCHW = decoded_all(files, channels=self.channels, size=self.size)
        return {"input": image_BCHW, "target": self.target_N[indices]}


def read_all(
    base: Path, paths: list[str], *, channels: int, size: int, image_NCHW: NDArray[np.uint8] | None
) -> Iterator[tuple[bytes, str | None]]:
    """The SHA-256 of each file and its error, if any. Its pixels go to `image_NCHW`; without one they are only checked.

    Uses threads: Pillow decodes and resizes without the GIL.
    """
    from PIL import Image

    def read(place: int) -> tuple[bytes, str | None]:
        digest = b""
        try:
            content = (base / paths[place]).read_bytes()
            digest = hashlib.sha256(content).digest()
            with Image.open(io.BytesIO(content)) as image:
                if image_NCHW is None:
                    check(image)
                else:
                    image_NCHW[place] = to_array(image, channels=channels, size=size)
        except Exception as e:  # Pillow raises nearly anything for a broken file
            return digest, reason(e)
        return digest, None

    with warnings.catch_warnings(), ThreadPoolExecutor(cores()) as pool:
        warnings.simplefilter("ignore")
        for first in range(0, len(paths), AT_ONCE):
            yield from pool.map(read, range(first, min(first + AT_ONCE, len(paths))))


def scratch(folder: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """An array on disk that is deleted with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, np.uint8, mode="w+", shape=shape)


def shown(results: Iterable[Any], text: str, total: int) -> Iterable[Any]:
    """Yields the results, with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import track

    return track(results, text, total, console=Console(stderr=True), disable=rank_of() > 0, transient=True)
