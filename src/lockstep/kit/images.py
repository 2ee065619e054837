"""Decodes image files with Pillow; data sets of images, normalised in batches on the device. Does not import torch."""

import copy
import hashlib
import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from lockstep import Arrays, Batch, DataSet, UserError, files, is_pillow, sampler, system, world
from lockstep.kit.pixels import (
    ENDINGS,
    Frame,
    Preprocess,
    Size,
    check_depth,
    original_size,
    read_error_text,
    resize_nearest,
    to_array,
    upright,
)

if TYPE_CHECKING:
    from PIL.Image import Image

# B batch · C channel · H W pixel · N file

# --- Samples that workers decode ---


def decode(file: Any, *, channels: int, frame: Frame, least: int | None = None) -> Any:
    """image_CHW in the frame, of a path or an open file. `least`: the uncropped PIL image, see `pixels.upright`."""
    from PIL import Image

    source = io.BytesIO(files.read_bytes(file, follows=True)) if isinstance(file, Path) else file
    with warnings.catch_warnings(), Image.open(source) as image:
        warnings.simplefilter("ignore")  # about invalid EXIF data and palettes
        if least is not None:
            return upright(image, channels=channels, least=least)
        return to_array(image, channels=channels, frame=frame)


def decode_all(files: Sequence[Any], **pixels: Any) -> Any:
    """image_BCHW of paths or open files; with `least`, a list of PIL images."""
    images = [decode(file, **pixels) for file in files]
    return images if "least" in pixels else np.stack(images)


def with_decode_arguments(samples: Any, **pixels: Any) -> Any:
    """A copy of the samples with other arguments for `decode`; the same object if they are not decoded on access."""
    if not getattr(samples, "decoding", None):
        return samples
    samples = copy.copy(samples)
    samples.decoding = {**samples.decoding, **pixels}
    return samples


class Files:
    """Image files and their targets, decoded by workers on access."""

    draws_random_numbers = False

    def __init__(self, base: Path, names: Iterable[str], target_N: NDArray[Any], **pixels: Any) -> None:
        # One array of bytes: with a list of strings, reference counts would make workers copy its memory page by page.
        self.base, self.name_N = base, np.array([os.fsencode(name) for name in names], dtype=np.bytes_)
        self.target_N, self.decoding = target_N, pixels

    def __len__(self) -> int:
        return len(self.target_N)

    def file(self, index: int) -> Any:
        return self.base / os.fsdecode(self.name_N[index])

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        return {"input": decode_all([self.file(i) for i in indices], **self.decoding), "target": self.target_N[indices]}


class Packed(Files):
    """Files in one array with the bytes of all files. `end_N`: the offset at which each file ends."""

    def __init__(
        self, content: NDArray[np.uint8], end_N: NDArray[np.int64], target_N: NDArray[Any], **pixels: Any
    ) -> None:
        super().__init__(Path(), (), target_N, **pixels)
        self.packed, self.end_N = Arrays(content=content), end_N  # not copied to workers

    def file(self, index: int) -> Any:
        start = self.end_N[index - 1] if index else 0
        return io.BytesIO(self.packed.arrays["content"][start : self.end_N[index]].tobytes())


# --- All files of a part ---

AHEAD = 16  # files to read ahead, per thread
QUALITY = 95  # of stored JPEGs


@dataclass(frozen=True)
class FileRead:
    """A file: why it cannot be read, if so, and the bytes to store."""

    sha256: bytes
    problem: str | None
    stored: bytes = b""


def stored(image: "Image", content: bytes, form: Frame | int | None = None, channels: int = 3) -> bytes:
    """The pixels of a square, as CHW; or a JPEG whose shorter side has `form` pixels, the original file if it is not larger;
    or nothing, of an image that can be decoded.
    """
    from PIL import Image

    if isinstance(form, Frame):
        return to_array(image, channels=channels, frame=form).tobytes()
    if form is None or min(image.size) <= form:
        check_depth(image)
        image.draft("L", (1, 1))  # decodes a JPEG at 1/8 of its size, in 1/4 of the time
        image.load()
        return content if form else b""
    whole = upright(image, channels=channels, least=2 * form)
    scale, file = form / min(whole.size), io.BytesIO()
    size = max(form, round(whole.width * scale)), max(form, round(whole.height * scale))
    whole.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=QUALITY, subsampling=0)
    return file.getvalue()


def read_all(base: Path, paths: Sequence[str], what: str, **form: Any) -> Iterator[FileRead]:
    """Reads the files in order. `form`: arguments of `stored`.

    Uses threads, because Pillow releases the GIL to decode and resize. Shows a progress bar on a terminal.
    """
    from PIL import Image
    from rich.console import Console
    from rich.progress import track

    def read(index: int) -> FileRead:
        digest = bytes(32)
        try:
            content = files.read_bytes(base / paths[index], follows=True)
            digest = hashlib.sha256(content).digest()
            with Image.open(io.BytesIO(content)) as image:
                to_store = stored(image, content, **form)
        except Exception as e:  # Pillow raises almost any exception for a broken file
            return FileRead(digest, read_error_text(e))
        return FileRead(digest, None, to_store)

    def in_order() -> Iterator[FileRead]:
        size = AHEAD * system.cores()
        for first in range(0, len(paths), size):
            yield from pool.map(read, range(first, min(first + size, len(paths))))

    with warnings.catch_warnings(), ThreadPoolExecutor(system.cores()) as pool:
        warnings.simplefilter("ignore")
        console = Console(stderr=True)
        silent = world.rank_of() > 0 or not console.is_terminal  # rich ends a bar with an empty line elsewhere
        yield from track(in_order(), what, len(paths), console=console, disable=silent, transient=True)


# --- Masks, boxes and keypoints are resized and cropped along with their images ---

STAY = "images of {} x {} pixels are cropped or padded (data.resize={}, data.crop_pct={:g}), but `{}` would not move with them. Return masks of the images' size, boxes and keypoints as tv_tensors, or images of data.image_size. Masks cannot be padded."


def spatial(batch: Batch) -> Batch:
    """Batch values that may have image coordinates: masks, boxes, keypoints, and dicts and lists of them."""
    return {name: value for name, value in batch.items() if name != "input" and placed(value)}


def placed(value: Any, sizes: int = 2) -> list[Any]:
    """The arrays in a value that have image coordinates: more than `sizes` dimensions. A list counts as the first."""
    if isinstance(value, Mapping):
        return [array for item in value.values() for array in placed(item, sizes)]
    if isinstance(value, list | tuple):
        return [array for item in value for array in placed(item, sizes - 1)]
    return [value] if getattr(value, "ndim", 0) > sizes else []


def matches_image(value: Any, shape: Sequence[int]) -> bool:
    """Whether a mask, or torchvision's boxes or keypoints, match an image of `shape` (H, W)."""
    return tuple(getattr(value, "canvas_size", None) or value.shape[-2:]) == tuple(shape)


def move_into_frame(value: Any, frame: Frame, shape: Size, sizes: int) -> Any:
    """Moves values that belong to an image of `shape` into its frame; returns other values unchanged."""
    if isinstance(value, Mapping):
        return {name: move_into_frame(item, frame, shape, sizes) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [move_into_frame(item, frame, shape, sizes - 1) for item in value]
    if not placed(value, sizes) or not matches_image(value, shape):
        return value
    import torch
    from torchvision.transforms.v2 import functional as F

    if not hasattr(value, "canvas_size"):
        return frame.tensor(torch.as_tensor(value), resize_nearest)
    size, corner = frame.fitted(*shape)
    return F.crop(F.resize(value, [*size]), *corner, frame.size, frame.size)


def move_all_into_frame(values: Batch, frame: Frame, shape: Size, sizes: int) -> Batch:
    """Moves the values of a batch (`sizes` 2) or a sample (1) that belong to images of `shape` into the frame.

    Raises:
        UserError: images are cropped or padded, and other values have image coordinates, or masks would be padded.
    """
    spatial_values = {name: value for name, value in values.items() if name != "input" and placed(value, sizes)}
    _, corner = frame.fitted(*shape)
    for name, value in spatial_values.items() if any(corner) else ():
        # the class of padded pixels is undefined
        unpadded = min(corner) >= 0
        if not all(matches_image(x, shape) and (unpadded or hasattr(x, "canvas_size")) for x in placed(value, sizes)):
            raise UserError(STAY.format(shape[1], shape[0], frame.resize, frame.crop_pct, name))
    return {**values, **{name: move_into_frame(value, frame, shape, sizes) for name, value in spatial_values.items()}}


def in_frame(values: dict[str, Any], *, channels: int, frame: Frame, least: int | None = None) -> dict[str, Any]:
    """Converts a sample whose `input` and masks are PIL images to arrays in the frame. `least`: keeps the whole image.

    Raises UserError: see `move_all_into_frame`.
    """
    image = values["input"]
    masks = {n: np.array(v) for n, v in values.items() if n != "input" and is_pillow(v) and len(v.getbands()) == 1}
    values = {**values, **masks}
    if least is not None:  # a JPEG decoded at a reduced size would no longer match its masks
        has_masks = any(placed(value, 1) for name, value in values.items() if name != "input")
        return {**values, "input": upright(image, channels=channels, least=0 if has_masks else least)}
    width, height = original_size(image)
    moved = move_all_into_frame(values, frame, (height, width), 1)
    return {**moved, "input": to_array(image, channels=channels, frame=frame)}


# --- Data sets of images: bytes are copied to the device, then resized and normalised in batches ---

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GREY_MEAN, GREY_STD = (0.449,), (0.226,)  # means over ImageNet's three channels
NEEDED = ("image_size", "channels", "mean", "std")  # keys of `metadata` to read files without training data
FRAMING = ("resize", "crop_pct", "interpolation")  # further keys; older checkpoints lack them


class Images(DataSet):
    """Images as `input`: uint8, BCHW, of any size. `channels`, for classes that decode images: 3 for RGB, 1 for grey.

    `mean` and `std` have one number per channel. `resize`, `crop_pct` and `interpolation` are those of `pixels.Frame`.
    `build` replaces `model` by the values that the network was pretrained with, or else by those of this class.
    """

    unit = "images"
    endings = ENDINGS
    mean: ClassVar[Sequence[float]] = IMAGENET_MEAN
    std: ClassVar[Sequence[float]] = IMAGENET_STD
    classes: Sequence[str] = ()

    def __init__(
        self, *, image_size: int, channels: int | None = None, mean: str | Sequence[float] = "model",
        std: str | Sequence[float] = "model", channels_last: bool = True, resize: str = "squash", crop_pct: str | float = 1.0,
        interpolation: str = "bilinear", eval_size: int | None = None
    ) -> None:  # fmt: skip
        settings = {"mean": mean, "std": std, "resize": resize, "crop_pct": crop_pct, "interpolation": interpolation}
        defaults = self.defaults({"channels": channels})
        values: dict[str, Any] = {key: defaults[key] if value == "model" else value for key, value in settings.items()}
        self.pixel_mean, self.pixel_std = list(values.pop("mean")), list(values.pop("std"))
        self.frame, self.channels_last = Frame(image_size, **values), channels_last
        self.eval_frame = replace(self.frame, size=eval_size or image_size)

    @classmethod
    def defaults(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """The values that replace `model` in a `data` node if the network is not pretrained."""
        grey = data.get("channels") == 1 and cls.mean is IMAGENET_MEAN  # the class does not set its own mean
        mean, std = (GREY_MEAN, GREY_STD) if grey else (cls.mean, cls.std)
        return {"mean": list(mean), "std": list(std), "resize": "crop", "crop_pct": 1.0, "interpolation": "bilinear"}

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        channels = len(cls.defaults(data)["mean"])
        if data.get("channels") not in (None, channels):
            yield f"data.channels={data['channels']} has no effect: these images have {channels}. Remove it."
        for key in ("mean", "std"):
            if isinstance(value := data.get(key), list) and len(value) != channels:
                yield f"data.{key}={value} has {len(value)} numbers, but the images need {channels}: one per channel."

    @property
    def channels(self) -> int:
        return len(self.pixel_mean)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        numbers = {"mean": self.pixel_mean, "std": self.pixel_std}
        frame = asdict(self.eval_frame)  # the frame used to read files
        shape = {"channels": self.channels, "image_size": frame.pop("size")}
        part = vars(self).get("train")  # set in `__init__`
        if isinstance(part, Arrays) and "input" in part.arrays and part.arrays["input"].dtype.kind == "f":
            raise UserError(
                f"{type(self).__name__}: images are uint8, from 0 to 255, but `input` is {part.arrays['input'].dtype}. Convert them, or subclass DataSet, whose arrays reach the network unchanged."
            )
        return {**shape, **frame, "classes": list(self.classes), **numbers}

    @property
    def image_size(self) -> int:
        return self.frame.size

    def model_kwargs(self) -> dict[str, Any]:
        return {"in_channels": self.channels, "image_size": self.image_size}

    def uncropped(self, part: str, least: int) -> Any:
        """None if the samples are not decoded on access."""
        samples = getattr(self, part)
        return None if (whole := with_decode_arguments(samples, least=least)) is samples else whole

    @property
    def evaluated(self) -> "Images":
        if self.frame == self.eval_frame:
            return self
        dataset = copy.copy(self)
        dataset.frame = self.eval_frame
        vars(dataset).pop("preprocessing", None)
        for part in sampler.PARTS:
            setattr(dataset, part, with_decode_arguments(getattr(self, part), frame=dataset.frame))
        dataset.evaluation_sets = {
            n: with_decode_arguments(samples, frame=dataset.frame)
            for n, samples in (self.evaluation_sets or {}).items()
        }
        return dataset

    @property
    def decoding(self) -> dict[str, Any]:
        """Arguments for `decode`."""
        return {"channels": self.channels, "frame": self.frame}

    def read(self, path: Path) -> dict[str, Any]:
        return {"input": decode(path, channels=self.channels, frame=self.eval_frame)}

    @classmethod
    def for_files(cls, metadata: Mapping[str, Any]) -> Self:
        if missing := [key for key in NEEDED if not metadata.get(key)]:
            raise UserError(
                f"input: to read image files, the `metadata` of the training data lacks {', '.join(missing)}. Pass input=test, val or train for a part of the run's own data."
            )
        dataset = super().for_files(metadata)
        dataset.frame = dataset.eval_frame = Frame(
            metadata["image_size"], **{key: metadata[key] for key in FRAMING if key in metadata}
        )
        dataset.channels_last = True
        dataset.pixel_mean, dataset.pixel_std = metadata["mean"], metadata["std"]
        return dataset

    def mask_size(self, path: Path) -> tuple[int, int]:
        from PIL import Image

        with files.open_plain(path, follows=True) as file, Image.open(file) as image:
            return original_size(image)

    @cached_property
    def preprocessing(self) -> Preprocess:
        return Preprocess(self.frame, mean=self.pixel_mean, std=self.pixel_std, channels_last=self.channels_last)

    def preprocess(self, batch: Batch) -> Batch:
        image_BCHW = batch["input"]
        if image_BCHW.shape[1] != self.channels:
            raise UserError(
                f"the images have {image_BCHW.shape[1]} channels, but data.mean and data.std have {self.channels} numbers. Set one number per channel."
            )
        height, width = image_BCHW.shape[-2:]
        if (height, width) != (self.image_size, self.image_size):
            batch = move_all_into_frame(batch, self.frame, (height, width), 2)
        return {**batch, "input": self.preprocessing(image_BCHW)}
