"""From image files to a network's input: lists and decodes files, and normalises batches on the device.

Imports nothing from Lockstep, because exported folders contain a copy of this file. Imports torch only for batches.
"""

import heapq
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

# B batch · C channel · H W pixel

# --- The files in a folder ---

# Formats of photographs and drawings that Pillow reads without plugins. Other files are counted in `left_out`.
ENDINGS = (
    ".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".jp2",
    ".j2k", ".tga", ".qoi",
)  # fmt: skip
# Hidden folders, and folders of file servers, archives and operating systems.
JUNK = re.compile(r"\.|(@eadir|__macosx|[#@]recycle|\$recycle\.bin|#snapshot|lost\+found|system volume information)$", re.I)  # fmt: skip
MASK = re.compile(r"[ _-]mask([ _-]?\d+)?(?=\.\w+$)", re.I)  # at the end of a file's name


def file_name_text(name: str) -> str:
    """A file's name as text in one Unicode form, with bytes escaped that are not UTF-8."""
    return unicodedata.normalize("NFC", os.fsencode(name).decode(errors="backslashreplace"))


class Walk:
    """The files with these `endings` in each of `folders`, recursively, sorted by name. Files precede subfolders.

    Links do not duplicate files: each real folder and file is listed once, at its real path if that is in `folders`.
    Files that are not links need no system call. Raises OSError for an unreadable folder.
    """

    def __init__(self, folders: Iterable[str], endings: tuple[str, ...] = ENDINGS) -> None:
        self.left_out = Counter[str]()  # number of files by ending, folder name or reason
        self.files: dict[str, dict[str, list[str]]] = {top: {} for top in folders}  # names by folder
        seen = set[str]()
        heap = sorted((int(os.path.islink(top)), top, top) for top in self.files)  # noqa: PTH114
        while heap:
            rank, path, top = heapq.heappop(heap)  # 0: folders, 1: links to folders, 2: links to files
            parent, name = os.path.split(real := os.path.realpath(path))
            is_listed = rank == 2 and parent in seen and name.lower().endswith(endings) and os.path.lexists(real)
            if real in seen or is_listed:
                self.left_out["links to listed files"] += 1
            elif rank == 2:
                self.files[top][os.path.dirname(path)].append(os.path.basename(path))  # noqa: PTH119, PTH120
            else:
                self.files[top][path] = [*self.taken(path, top, endings, heap)]
            seen.add(real)
        for top, by_path in self.files.items():
            order = sorted(by_path, key=lambda path: path.split(os.sep))  # noqa: PTH206
            self.files[top] = {path: self.without_masks(sorted(by_path[path])) for path in order}

    def taken(self, path: str, top: str, endings: tuple[str, ...], heap: list[Any]) -> Iterator[str]:
        """The names of the files in the folder `path`. Adds its subfolders and links to the `heap`."""
        with os.scandir(path) as entries:
            for entry in entries:
                name, is_file = entry.name, entry.is_file(follow_symlinks=False)
                is_folder = not is_file and os.path.isdir(entry.path)  # noqa: PTH112  # false for a link to itself
                if JUNK.match(name) if is_folder else name[0] == "." or not name.lower().endswith(endings):
                    ending = os.path.splitext(name)[1].lower() or "without an extension"  # noqa: PTH122
                    self.left_out[f"{name}/" if is_folder else "hidden" if name[0] == "." else ending] += 1
                elif is_file:
                    yield name
                else:
                    heapq.heappush(heap, (int(entry.is_symlink()) if is_folder else 2, entry.path, top))

    def without_masks(self, names: list[str]) -> list[str]:
        """The files of a folder without masks, such as `1_mask.png` of `1.png`."""
        known = {*names}
        images = [name for name in names if (image := MASK.sub("", name)) == name or image not in known]
        self.left_out["masks of images"] += len(names) - len(images)
        return images

    def __iter__(self) -> Iterator[str]:
        return (f"{at}{os.sep}{name}" for tree in self.files.values() for at, names in tree.items() for name in names)

    def __str__(self) -> str:
        """The files that were left out, in one line."""
        return ", ".join(f"{count:,} {file_name_text(label)}" for label, count in (+self.left_out).most_common())


# --- With Pillow ---

BACKGROUND = "white"  # behind transparent pixels
Size = tuple[int, int]  # height and width


@dataclass(frozen=True)
class Frame:
    """How an image becomes a square of `size` pixels, as with torchvision's Resize (antialiased) and CenterCrop.

    crop: resizes the shorter side to size / crop_pct and keeps the centre. pad: resizes the longer side and pads with
    black. squash: resizes both sides.
    """

    size: int
    resize: str = "squash"
    crop_pct: float = 1.0
    interpolation: str = "bilinear"

    def fitted(self, height: int, width: int) -> tuple[Size, Size]:
        """The size an image is resized to, and top and left of the square in it, negative if the square is larger."""
        height, width = (1, 1) if self.resize == "squash" else (height, width)
        side, full = (max if self.resize == "pad" else min)(height, width), math.floor(self.size / self.crop_pct)
        resized = max(1, full * height // side), max(1, full * width // side)
        top, left = (round(over / 2) if (over := side - self.size) > 0 else -(-over // 2) for side in resized)
        return resized, (top, left)

    def image(self, image: "Image") -> "Image":
        """Resizes and crops or pads an image to the square."""
        from PIL import Image

        (height, width), (top, left) = self.fitted(image.height, image.width)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling[self.interpolation.upper()])
        square = left, top, left + self.size, top + self.size
        return image if square == (0, 0, *image.size) else image.crop(square)

    def tensor(self, value_HW: "Tensor", resized: Callable[["Tensor", Size], "Tensor"]) -> "Tensor":
        """Resizes images or masks (..., H, W) with `resized`, and crops or pads them to the square."""
        from torch.nn import functional as F

        (height, width), (top, left) = self.fitted(value_HW.shape[-2], value_HW.shape[-1])
        edges = [-left, self.size - width + left, -top, self.size - height + top]  # negative values crop
        value_HW = resized(value_HW, (height, width))
        return F.pad(value_HW, edges) if any(edges) else value_HW

    def mask(self, mask_HW: NDArray[np.integer], size: Size | None = None) -> "Image":
        """Class numbers as an image of 8 bits, or 16 bits if they reach 255. `size`: maps it back to that image size.

        Pixels outside of the crop become 255, or 65535 with 16 bits.
        """
        from PIL import Image

        image = Image.fromarray(mask_HW.astype(np.uint8 if mask_HW.max() < 255 else np.uint16))
        if size is None:
            return image
        (height, width), (top, left) = self.fitted(size[1], size[0])
        matrix, fill = (width / size[0], 0, -left, 0, height / size[1], -top), 255 if image.mode == "L" else 65535
        return image.transform(size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=fill)


def upright(image: "Image", *, channels: int, least: int = 0) -> "Image":
    """An 8-bit RGB or grey image, upright by its EXIF orientation. `least`: a sufficient shorter side; 0: full size."""
    from PIL import Image, ImageOps

    check_depth(image)
    if least:  # decodes a JPEG at 1/2, 1/4 or 1/8 size; no resize matches it to within 1 level
        image.draft(None, (least, least))
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I"):  # 16-bit grey: `convert` would clip everything above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, BACKGROUND), image.convert("RGBA"))
    if image.mode != (mode := "L" if channels == 1 else "RGB"):
        return image.convert(mode)
    image.load()  # while the file is open
    return image


def chw(image: Any) -> NDArray[np.uint8]:
    """image_CHW of a PIL image or an array (H, W, C) or (H, W). A copy, stored as HWC."""
    pixels = np.array(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def to_array(image: "Image", *, channels: int, frame: Frame) -> NDArray[np.uint8]:
    """uint8 image_CHW in the frame."""
    return chw(frame.image(upright(image, channels=channels)))


def original_size(image: "Image") -> tuple[int, int]:
    """Width and height of an image, rotated by its EXIF orientation, without decoding it."""
    from PIL import ExifTags

    width, height = image.size
    # Pillow rotates TIFFs itself
    upright = image.format == "TIFF" or image.getexif().get(ExifTags.Base.Orientation, 1) < 5
    return (width, height) if upright else (height, width)


def read_error_text(error: Exception) -> str:
    """Why a file cannot be read, in one line."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):  # its message contains the memory address of the file object
        return "cannot identify the image format"
    return " ".join(str(error).split()) or type(error).__name__


def check_depth(image: "Image") -> None:
    # `convert` would clip values above 255. In these formats, Pillow's mode I means 16 bits.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PPM", "PNG")):
        raise ValueError(f"its pixels have 32 bits (mode {image.mode}), not 8 or 16")


# --- With torch, in batches ---


class Preprocess:
    """Resizes and normalises on the device. Copying bytes to it instead of floats takes a quarter of the bandwidth."""

    def __init__(
        self, frame: Frame, *, mean: Sequence[float], std: Sequence[float], channels_last: bool = False
    ) -> None:
        import torch

        self.frame = frame
        # (x / 255 - mean) / std as one multiplication and one addition
        self.scale = torch.tensor([1 / (255 * s) for s in std]).view(-1, 1, 1)
        self.shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(-1, 1, 1)
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, image_BCHW: "Tensor") -> "Tensor":
        """Converts uint8 images of any size to normalised float32 in the frame."""
        import torch
        from torch.nn import functional as F

        self.scale, self.shift = self.scale.to(image_BCHW.device), self.shift.to(image_BCHW.device)
        x = image_BCHW
        if x.shape[-2:] != (self.frame.size, self.frame.size):
            x = self.frame.tensor(x.float(), partial(F.interpolate, mode=self.frame.interpolation, antialias=True))
            x = x.clamp_(0, 255) if self.frame.interpolation == "bicubic" else x  # bicubic overshoots
        # Copy into a tensor of that format. `contiguous` does nothing for images of one channel, which match both
        # formats. The strides of the first weights would then determine the network's memory format.
        out = torch.empty_like(x, dtype=torch.float32, memory_format=self.memory_format)
        return torch.addcmul(self.shift, x, self.scale, out=out)


def resize_nearest(masks: "Tensor", size: tuple[int, int]) -> "Tensor":
    """Resizes ...HW of any dtype to `size` without mixing values. F.interpolate supports no integers except bytes."""
    import torch

    (h, w), (height, width) = masks.shape[-2:], size
    y_H, x_W = (2 * torch.arange(side, device=masks.device) + 1 for side in size)
    return masks[..., (y_H * h // (2 * height))[:, None], x_W * w // (2 * width)]
