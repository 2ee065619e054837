"""Data sets of images: bytes until they are on the device, then resized and normalised in batches."""

import hashlib
import io
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lockstep.data.dataset import Batch, DataSet
from lockstep.data.pixels import refuse_numbers, to_array
from lockstep.errors import UserError
from lockstep.machine.world import cores, rank_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from lockstep.data.preprocess import Preprocess


# --- Image files to bytes of one size, with Pillow. Free of torch ---
#
# A core decodes 157 images/s from 500 x 375 to 224 pixels, and 136 into the cache (docs/measurements/speed.md).

# B batch · C channel · H W pixel · N file


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


# --- Data sets of images: bytes until they are on the device, then resized and normalised in batches ---

# B batch · C channel · H W pixel


Normalisation = tuple[Sequence[float], Sequence[float]]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GREY_MEAN, GREY_STD = (0.449,), (0.226,)  # the means of ImageNet's three channels


class Images(DataSet):
    """Images as `input`: uint8, BCHW, of any size. `channels`, of classes that decode images: 3 for RGB, 1 for grey.

    `mean` and `std` are one number per channel. `build` replaces `model` by the values the network was pretrained with, or
    by those of this class.
    """

    unit = "images"
    mean: ClassVar[Sequence[float]] = IMAGENET_MEAN
    std: ClassVar[Sequence[float]] = IMAGENET_STD
    classes: Sequence[str] = ()

    def __init__(
        self,
        *,
        image_size: int,
        channels: int | None = None,
        mean: str | Sequence[float] = "model",
        std: str | Sequence[float] = "model",
        channels_last: bool = True,
    ) -> None:
        self.image_size, self.channels_last = image_size, channels_last
        own_mean, own_std = self.normalisation({"channels": channels})
        self.pixel_mean = list(own_mean if isinstance(mean, str) else mean)
        self.pixel_std = list(own_std if isinstance(std, str) else std)

    @classmethod
    def normalisation(cls, data: Mapping[str, Any]) -> Normalisation:
        """Mean and std of the images of a `data` node, used if the network was not pretrained with its own."""
        grey = data.get("channels") == 1 and cls.mean is IMAGENET_MEAN  # of a class that names no other mean
        return (GREY_MEAN, GREY_STD) if grey else (cls.mean, cls.std)

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        channels, std = len(cls.normalisation(data)[0]), data.get("std")
        if data.get("channels") not in (None, channels):
            yield f"data.channels={data['channels']} has no effect: these images have {channels}. Leave it out."
        for key in ("mean", "std"):
            value = data.get(key)
            if isinstance(value, list) and len(value) != channels:
                yield f"data.{key}={value} has {len(value)} numbers; these images have {channels} channels. Give one number per channel."
        if isinstance(std, list) and not all(s > 0 for s in std):
            yield f"data.std={std} must be above 0."

    @property
    def channels(self) -> int:
        return len(self.pixel_mean)

    @cached_property
    def about(self) -> dict[str, Any]:
        return {
            "channels": self.channels,
            "image_size": self.image_size,
            "classes": list(self.classes),
            "mean": self.pixel_mean,
            "std": self.pixel_std,
        }

    def network_arguments(self) -> dict[str, Any]:
        return {"in_channels": self.channels, "image_size": self.image_size}

    @cached_property
    def preprocessing(self) -> "Preprocess":
        from lockstep.data.preprocess import Preprocess

        numbers = {"mean": self.pixel_mean, "std": self.pixel_std}
        return Preprocess(image_size=self.image_size, channels_last=self.channels_last, **numbers)

    def preprocess(self, batch: Batch) -> Batch:
        image_BCHW = batch["input"]
        if image_BCHW.shape[1] != self.channels:
            raise UserError(
                f"the images have {image_BCHW.shape[1]} channels, and data.mean and data.std {self.channels} numbers. Give one for each channel."
            )
        if image_BCHW.shape[-2:] != (self.image_size, self.image_size):
            from lockstep.data.preprocess import resize_nearest

            masks = {name: v for name, v in spatial(batch).items() if v.shape[-2:] == image_BCHW.shape[-2:]}
            batch = {**batch, **{name: resize_nearest(value, self.image_size) for name, value in masks.items()}}
        return {**batch, "input": self.preprocessing(image_BCHW)}


def spatial(batch: Batch) -> Batch:
    """Batch values that may refer to places in the images: masks, boxes, keypoints."""
    return {name: value for name, value in batch.items() if name != "input" and getattr(value, "ndim", 0) > 2}
