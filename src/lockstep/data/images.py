"""Data sets of images: bytes until they are on the device, then resized and normalised in batches. Free of torch."""

import copy
import csv
import glob
import hashlib
import io
import os
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from lockstep.data.dataset import STAY, Batch, DataSet, Indices
from lockstep.data.pixels import ENDINGS, Preprocess, Walk, check_depth, original_size, reason, resize_nearest, to_array
from lockstep.data.sampler import PARTS
from lockstep.errors import UserError, explained, raise_problems
from lockstep.machine.files import open_plain, read_bytes
from lockstep.machine.world import cores, rank_of

# B batch · C channel · H W pixel · N file

# --- Lists image files: below a folder, of a glob, of a CSV ---

LISTS = (".csv", ".tsv", ".txt")  # endings of lists of files
SHOWN = 10  # lines or files that a message lists
PART_NAMES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test", "testing": "test"}  # fmt: skip
NONE, YEAR, ANY = "$^", r"[ _-]?\d{4}$", r"^\d+[ _-]|[ _-]?\d{4}$"  # around a part's name: 01_train, train2017
Row = dict[str, str]  # cells by column
Check = Callable[[int, Row], str | None]


@lru_cache(10_000)
def part_of(name: str, around: str = ANY) -> str | None:
    """The part that is meant by the name of a folder, a split or a cell, with such numbers `around` it."""
    core = re.sub(rf"^seg[ _-]|[ _-]?(set|data|images?)$|{around}", "", name.strip().lower())  # seg_test, test_set
    return PART_NAMES.get(core)


def part_names(names: Iterable[str], where: str) -> dict[str, str]:
    """Those of `names` that mean a part, by the part. Raises UserError: two of them mean the same one.

    Years count beside no exact name (train, train2017), numbers only if all have them (01_train, 02_test; not the classes 0-train, 1-bus).
    """
    exact = {name: part_of(name, NONE) for name in names}
    around = ANY if all(map(part_of, exact)) else YEAR
    by_part: dict[str, str] = {}
    for name in exact:
        part = exact[name] or part_of(name, around)
        if part in by_part and (exact[name] or part not in exact.values()):
            raise UserError(f"{where} has {by_part[part]} and {name}, which are both the {part} part. Merge them.")
        by_part |= {part: name} if part and (exact[name] or part not in exact.values()) else {}
    return by_part


def reading(root: Path) -> AbstractContextManager[None]:
    """Raises UserError in place of OSError for what is below data.root."""
    return explained(f"data.root={root} cannot be read", "Make it readable, or set data.root=<another folder>.")


def read_csv(path: Path, needed: Sequence[str], others: str, check: Check) -> list[Row]:
    """The rows of a CSV with a column `path`, separated by commas, semicolons or tabs. Blank lines are skipped.

    `check` gets the line and the cells of a row, may change them, and returns what is wrong with it.

    Raises:
        UserError: it is no CSV, it lacks a column or rows, or rows are wrong.
    """
    line, rows, problems = 0, list[Row](), list[str]()
    try:
        content = read_bytes(path, follows=True)
        text, separators = content.decode("utf-8-sig"), "\t" if path.suffix.lower() == ".tsv" else ",;\t"
        separator = next((each for each in separators if each in text.partition("\n")[0]), ",")
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        columns = reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
        line = reader.line_num
        if missing := [name for name in needed if columns.count(name) != 1]:
            raise UserError(
                f"{path} has no column {' and no column '.join(missing)}; it has {', '.join(columns) or 'none'}. Its first line must name the columns, each once: {','.join(needed)} or {others}."
            )
        for row in reader:
            line = reader.line_num
            if problem := row_problem(path.parent, row) or check(line, row):
                problems.append(f"{path}, line {line}: {problem}")
            rows.append(row)
    except (csv.Error, UnicodeDecodeError, OSError) as e:
        line = content.count(b"\n", 0, e.start) if isinstance(e, UnicodeDecodeError) else line
        raise UserError(f"{path}, line {line + 1}: not a CSV in UTF-8 ({e}). Repair it, or pass another.") from None
    if not rows:
        raise UserError(f"{path} lists no images below its first line.")
    raise_problems(problems[:SHOWN] + [f"{len(problems) - SHOWN:,} more lines are wrong."] * (len(problems) > SHOWN))
    return rows


def row_problem(base: Path, row: dict[Any, Any]) -> str | None:
    """What is wrong with a row. Its path becomes that on this disk: with / for the \\ of Windows, without spaces around it, in either
    Unicode form.
    """
    if None in row or None in row.values():
        return f"it has {'more' if None in row else 'fewer'} cells than the first line. Put a text with a separator into quotes, and write 1.5 with a point."
    if not row["path"].strip("\0 ") or "\0" in row["path"]:
        return "a row needs a path. Add it, or remove the line."
    plain = row["path"].strip().replace("\\", "/")
    forms = [row["path"], plain, *(unicodedata.normalize(form, plain) for form in ("NFC", "NFD"))]
    row["path"] = next((each for each in forms if os.path.lexists(base / each)), plain)
    return None


@dataclass(frozen=True)
class Listing:
    """Image files in the order of their rows. `paths` are relative to `base` or absolute."""

    base: Path
    paths: list[str]
    targets: list[str] = field(default_factory=list)  # class names, or the cells of a CSV; empty without
    parts: list[str] = field(default_factory=list)  # of a data set; one without parts of its own has `train` only
    left_out: str = ""  # what else lies there


def find_inputs(given: str, endings: tuple[str, ...] = ENDINGS, unit: str = "images", check: Check | None = None) -> Listing:  # fmt: skip
    """The files of a folder (with all below it), a glob, a CSV with a column `path` (a TSV has tabs), or one file.

    `check` is that of `read_csv`.

    Raises:
        UserError: there is no such thing, it holds no files with these `endings`, or it cannot be read.
    """
    path, left_out = Path(given).expanduser(), ""
    with explained(f"input={given} cannot be read", "Make it readable, or pass another folder or file."):
        if path.is_file() and path.suffix.lower() in LISTS and not path.name.lower().endswith(endings):
            rows = read_csv(path, ("path",), "path,target", check or (lambda *_: None))
            targets = [row["target"] for row in rows if "target" in row]
            return Listing(path.parent, [row["path"] for row in rows], targets)
        if path.is_file():
            return Listing(Path(), [str(path)])
        if path.is_dir():
            named = f"{unit} (files that end in {', '.join(endings)})" if all(endings) else "files"
            found = Walk([str(path)], endings)
            names, left_out, empty = list(found), str(found), f"holds no {named}"
        elif any(letter in given for letter in "*?["):
            matches = glob.iglob(str(path), recursive=True)  # noqa: PTH207  # Path.glob refuses absolute ones
            names, empty = sorted(name for name in matches if Path(name).is_file()), "matches no file"
        else:
            raise UserError(
                f"input={given} does not exist. Pass a folder of {unit}, a glob in quotes, a CSV with a column path, one file, or a part of the run's own data: {', '.join(PARTS)}."
            )
    if not names:
        raise UserError(f"input={given} {empty}{left_out and f'; it has {left_out}'}. Pass another folder or file.")
    return Listing(Path(), names, left_out=left_out)


# --- Image files to bytes of one size, with Pillow ---
#
# A core decodes 490 images/s from 500 x 375 to 224 pixels, and 323 into the cache (docs/measurements/speed.md).

AT_ONCE = 1024  # files queued per thread


def decoded(file: Any, **pixels: Any) -> Any:
    """`to_array` of a file, by its path or opened."""
    from PIL import Image

    source = io.BytesIO(read_bytes(file, follows=True)) if isinstance(file, Path) else file
    with warnings.catch_warnings(), Image.open(source) as image:
        warnings.simplefilter("ignore")  # about odd EXIF data and palettes
        return to_array(image, **pixels)


def decoded_all(files: Sequence[Any], **pixels: Any) -> Any:
    """image_BCHW of files, by their paths or opened; with `least`, a list of PIL images."""
    images = [decoded(file, **pixels) for file in files]
    return images if "least" in pixels else np.stack(images)


class Files:
    """Image files and their targets, decoded on access, by workers."""

    def __init__(self, base: Path, names: Iterable[str], target_N: NDArray[Any], **pixels: Any) -> None:
        # One array of bytes, because reference counts make workers copy a list of strings page by page.
        self.base, self.name_N = base, np.array([os.fsencode(name) for name in names], dtype=np.bytes_)
        self.target_N, self.decoding = target_N, pixels

    def __len__(self) -> int:
        return len(self.name_N)

    def __getitem__(self, indices: Indices) -> dict[str, Any]:
        files = [self.base / os.fsdecode(self.name_N[index]) for index in indices]
        return {"input": decoded_all(files, **self.decoding), "target": self.target_N[indices]}


def read_all(
    base: Path, paths: list[str], what: str, *, image_NCHW: NDArray[np.uint8] | None, **pixels: Any
) -> Iterator[tuple[bytes, str | None, int]]:
    """The SHA-256 of each file, its error, if any, and the largest pixel if it has 16 bits, otherwise 0. Its pixels go to `image_NCHW`; without one they are only checked.

    Uses threads, because Pillow decodes and resizes without the GIL. Shows a progress bar on standard error.
    """
    from PIL import Image
    from rich.console import Console
    from rich.progress import track

    def read(place: int) -> tuple[bytes, str | None, int]:
        digest, brightest = b"", 0
        try:
            content = read_bytes(base / paths[place], follows=True)
            digest = hashlib.sha256(content).digest()
            with Image.open(io.BytesIO(content)) as image:
                if image_NCHW is not None:
                    image_NCHW[place] = to_array(image, **pixels)
                else:
                    check_depth(image)
                    image.draft("L", (1, 1))  # decodes a JPEG at an eighth of its size, in a quarter of the time
                    image.load()
                brightest = int(np.asarray(image).max()) if image.mode.startswith("I") else 0
        except Exception as e:  # Pillow raises nearly anything for a broken file
            return digest, reason(e), 0
        return digest, None, brightest

    with warnings.catch_warnings(), ThreadPoolExecutor(cores()) as pool:
        warnings.simplefilter("ignore")
        blocks = (range(first, min(first + AT_ONCE, len(paths))) for first in range(0, len(paths), AT_ONCE))
        results = (result for block in blocks for result in pool.map(read, block))
        yield from track(results, what, len(paths), console=Console(stderr=True), disable=rank_of() > 0, transient=True)


# --- Data sets of images: bytes until they are on the device, then resized and normalised in batches ---

Normalisation = tuple[Sequence[float], Sequence[float]]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GREY_MEAN, GREY_STD = (0.449,), (0.226,)  # the means of ImageNet's three channels
NEEDED = ("image_size", "channels", "mean", "std")  # in `about`, to read files without the training data
USABLE = {"mean": (-1e3, 1e3), "std": (1e-4, 1e3)}  # of pixels from 0 to 1: beyond, float32 ends in infinities and NaN


class Images(DataSet):
    """Images as `input`: uint8, BCHW, of any size. `channels`, of classes that decode images: 3 for RGB, 1 for grey.

    `mean` and `std` are one number per channel. `build` replaces `model` by the values the network was pretrained with, or
    by those of this class.
    """

    unit = "images"
    endings = ENDINGS
    mean: ClassVar[Sequence[float]] = IMAGENET_MEAN
    std: ClassVar[Sequence[float]] = IMAGENET_STD
    classes: Sequence[str] = ()

    def __init__(
        self, *, image_size: int, channels: int | None = None, mean: str | Sequence[float] = "model",
        std: str | Sequence[float] = "model", channels_last: bool = True, resize: str = "squash"
    ) -> None:  # fmt: skip
        self.image_size, self.channels_last, self.resize = image_size, channels_last, resize
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
        channels = len(cls.normalisation(data)[0])
        if data.get("channels") not in (None, channels):
            yield f"data.channels={data['channels']} has no effect: these images have {channels}. Remove it."
        for key, (least, most) in USABLE.items():
            value = data.get(key)
            if not isinstance(value, list):
                continue
            if len(value) != channels:
                yield f"data.{key}={value} has {len(value)} numbers; these images have {channels} channels. Set one number per channel."
            if not all(least <= number <= most for number in value):
                yield f"data.{key}={value} must be from {least:g} to {most:g}: pixels are from 0 to 1."

    @property
    def channels(self) -> int:
        return len(self.pixel_mean)

    @cached_property
    def about(self) -> dict[str, Any]:
        numbers = {"mean": self.pixel_mean, "std": self.pixel_std}
        shape = {"channels": self.channels, "image_size": self.image_size, "resize": self.resize}
        return {**shape, "classes": list(self.classes), **numbers}

    def network_arguments(self) -> dict[str, Any]:
        return {"in_channels": self.channels, "image_size": self.image_size}

    def whole(self, part: str, least: int) -> Any:
        """None for what is not decoded as it is read, and where masks or boxes belong to the squares."""
        samples = getattr(self, part)
        if not isinstance(getattr(samples, "decoding", None), dict) or spatial(samples[np.array([0])], nested=True):
            return None
        samples = copy.copy(samples)
        samples.decoding = {**samples.decoding, "least": least}
        return samples

    @property
    def decoding(self) -> dict[str, Any]:
        """How images are decoded: arguments of `to_array`."""
        return {"channels": self.channels, "size": self.image_size, "resize": self.resize}

    def read(self, path: Path) -> dict[str, Any]:
        return {"input": decoded(path, **self.decoding)}

    @classmethod
    def for_files(cls, about: Mapping[str, Any]) -> Self:
        if missing := [key for key in NEEDED if not about.get(key)]:
            raise UserError(
                f"input: image files can be read only for a network that was trained on images with {', '.join(NEEDED)} in the `about` of their data; {', '.join(missing)} is not there. Pass input=test, or val or train: a part of the run's own data."
            )
        made = super().for_files(about)
        made.image_size, made.channels_last = about["image_size"], True
        made.resize = about.get("resize", "squash")  # what older versions did
        made.pixel_mean, made.pixel_std = about["mean"], about["std"]
        return made

    def mask_size(self, path: Path) -> tuple[int, int]:
        from PIL import Image

        with open_plain(path, follows=True) as file, Image.open(file) as image:
            return original_size(image)

    @cached_property
    def preprocessing(self) -> Preprocess:
        shape: dict[str, Any] = {"image_size": self.image_size, "resize": self.resize}
        return Preprocess(mean=self.pixel_mean, std=self.pixel_std, channels_last=self.channels_last, **shape)

    def preprocess(self, batch: Batch) -> Batch:
        image_BCHW = batch["input"]
        if image_BCHW.shape[1] != self.channels:
            raise UserError(
                f"the images have {image_BCHW.shape[1]} channels, but data.mean and data.std have {self.channels} numbers. Set one for each channel."
            )
        height, width = image_BCHW.shape[-2:]
        if (height, width) != (self.image_size, self.image_size):
            masks = {name: v for name, v in spatial(batch).items() if v.shape[-2:] == (height, width)}
            left = spatial(batch, nested=True).keys() - (masks.keys() if self.resize == "crop" else {})
            if height != width and self.resize != "squash" and left:
                raise UserError(STAY.format(self.resize, width, height, min(left)))
            batch = {**batch, **{name: self.preprocessing.square(v, resize_nearest) for name, v in masks.items()}}
        return {**batch, "input": self.preprocessing(image_BCHW)}


def spatial(batch: Batch, *, nested: bool = False) -> Batch:
    """Batch values that may refer to places in the images: masks, boxes, keypoints; with `nested`, also dicts and lists of them."""
    values = {name: value for name, value in batch.items() if name != "input" and (nested or hasattr(value, "ndim"))}
    return {name: value for name, value in values.items() if has_places(value)}


def has_places(value: Any, sizes: int = 2) -> bool:
    """Whether something in it has more dimensions than sample and number; a list with one entry for each sample stands for the first."""
    if isinstance(value, Mapping):
        return any(has_places(each, sizes) for each in value.values())
    if isinstance(value, list | tuple):
        return any(has_places(each, sizes - 1) for each in value)
    return bool(getattr(value, "ndim", 0) > sizes)
