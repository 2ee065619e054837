"""Images to a network's input: the files in a folder, files to bytes of one size with Pillow, bytes to normalised floats on their device.

Imports nothing of Lockstep: an exported folder has a copy of this file. Free of torch until a batch comes.
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

# Of photographs and drawings, in formats that Pillow reads by itself. Other files are counted as left out.
ENDINGS = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".avif", ".avifs", ".bmp", ".dib", ".gif", ".tif", ".tiff",
    ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx", ".tga", ".qoi",
)  # fmt: skip
# Hidden folders, and those of file servers, archives and systems.
JUNK = re.compile(r"\.|(@eadir|__macosx|[#@]recycle|\$recycle\.bin|#snapshot|lost\+found|system volume information)$", re.I)  # fmt: skip
MASK = re.compile(r"[ _-]mask([ _-]?\d+)?(?=\.\w+$)", re.I)  # at the end of a file's name
MASKED = 0.8  # of the images have a mask, or files called so are none
KINDS = 8  # of what was left out, in a message


def spelled(name: str) -> str:
    """A file's name as text: in one Unicode form, whatever system wrote it, and with bytes that are not UTF-8 escaped."""
    return unicodedata.normalize("NFC", os.fsencode(name).decode(errors="backslashreplace"))


def masks_of(names: list[str]) -> dict[str, str]:
    """The images of a folder that masks lie beside, by the mask."""
    there = {*names} if "mask" in "/".join(names).lower() else {}  # nearly no folder has such names
    return {name: image for name in there if (image := MASK.sub("", name)) != name and image in there}


class Walk:
    """The files with some `endings` in each of `folders` and all below it, by name, those of a folder before those of the folders in it.

    Links multiply nothing: each real folder and each file is taken once, where it lies rather than where a link to it lies. A file that is
    no link costs no system call. Raises OSError for a folder that cannot be read.
    """

    def __init__(self, folders: Iterable[str], endings: tuple[str, ...] = ENDINGS) -> None:
        self.left_out = Counter[str]()  # by ending, name of a folder, or why
        self.files: dict[str, dict[str, list[str]]] = {each: {} for each in folders}  # names by place, in each of them
        seen = set[str]()
        left = sorted((int(os.path.islink(each)), each, each, os.path.realpath(each)) for each in self.files)  # noqa: PTH114
        while left:
            rank, place, folder, real = heapq.heappop(left)  # 0: folders, 1: links to folders, 2: links to files
            parent, name = os.path.split(real)
            is_taken = rank == 2 and parent in seen and name.lower().endswith(endings) and os.path.lexists(real)
            if real in seen or is_taken:
                self.left_out["links to listed files"] += 1
            elif rank == 2:
                self.files[folder][os.path.dirname(place)].append(os.path.basename(place))  # noqa: PTH119, PTH120
            else:
                self.files[folder][place] = [*self.taken(place, folder, real, endings, left)]
            seen.add(real)
        for folder, places in self.files.items():
            order = sorted(places, key=lambda place: place.split(os.sep))  # noqa: PTH206
            self.files[folder] = {place: sorted(places[place]) for place in order}
        self.leave_out_masks([names for places in self.files.values() for names in places.values()])

    def taken(self, place: str, folder: str, real: str, endings: tuple[str, ...], left: list[Any]) -> Iterator[str]:
        """The names of the files in one place. Its folders and links are added to what is `left` to walk."""
        with os.scandir(place) as entries:
            for entry in entries:
                name, is_file = entry.name, entry.is_file(follow_symlinks=False)
                is_folder = not is_file and os.path.isdir(entry.path)  # noqa: PTH112  # a link may lead to itself
                if JUNK.match(name) if is_folder else name[0] == "." or not name.lower().endswith(endings):
                    ending = os.path.splitext(name)[1].lower() or "without an ending"  # noqa: PTH122
                    self.left_out[f"{name}/" if is_folder else "hidden" if name[0] == "." else ending] += 1
                elif is_file:
                    yield name
                else:
                    rank = int(entry.is_symlink()) if is_folder else 2
                    inside = os.path.realpath(entry.path) if rank else f"{real}{os.sep}{name}"
                    heapq.heappush(left, (rank, entry.path, folder, inside))

    def leave_out_masks(self, lists: list[list[str]]) -> None:
        """Removes names such as `1_mask.png` beside `1.png` from the lists, one for each place, if nearly all images have a mask."""
        image_of = [masks_of(names) for names in lists]
        masks, masked = sum(map(len, image_of)), sum(len({*images.values()}) for images in image_of)
        if masks and masked >= MASKED * (sum(map(len, lists)) - masks):
            for names, images in zip(lists, image_of, strict=True):
                names[:] = [name for name in names if name not in images]
            self.left_out["masks beside images"] = masks

    def __iter__(self) -> Iterator[str]:
        return (f"{at}{os.sep}{name}" for each in self.files.values() for at, names in each.items() for name in names)

    def __str__(self) -> str:
        """What was left out, in one line."""
        kinds = [f"{count:,} {spelled(what)}" for what, count in self.left_out.most_common()]
        kinds = [re.sub("^1 (link|image|mask)s (.*[^/])$", r"1 \1 \2", kind) for kind in kinds]  # no folder's name
        return ", ".join(kinds[:KINDS]) + (f", and {len(kinds) - KINDS:,} more kinds" if kinds[KINDS:] else "")


# --- With Pillow ---

BACKGROUND, WHITE_16 = "white", 0xFFFF  # behind what is transparent
# PNG states a transparent colour in the bits of the file, by Pillow's name of its pixels; those that Pillow reads have 8.
TO_8_BITS = {"L;2": 255 / 3, "L;4": 255 / 15, "RGB;16B": 1 / 256}


RESIZE = ("crop", "pad", "squash")
INTERPOLATION = ("bilinear", "bicubic")
Size = tuple[int, int]  # height and width
STRIP = 64  # sides of an image have at most this ratio before they are resized


@dataclass(frozen=True)
class Frame:
    """How an image of any shape becomes a square of `size` pixels, as by torchvision's Resize and CenterCrop, with antialiasing.

    crop: the shorter side becomes size / crop_pct, and the middle is kept. pad: the longer side does, on black. squash: both do.
    """

    size: int
    resize: str = "squash"
    crop_pct: float = 1.0
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for key, options in {"resize": RESIZE, "interpolation": INTERPOLATION}.items():
            if (value := getattr(self, key)) not in options:
                raise ValueError(f"{key}={value} is unknown; use one of {', '.join(options)}")

    def fitted(self, height: int, width: int) -> tuple[Size, Size]:
        """Height and width to which an image is resized, and top and left of the square in it, below 0 where the square is larger."""
        height, width = (1, 1) if self.resize == "squash" else (height, width)
        side, full = (max if self.resize == "pad" else min)(height, width), math.floor(self.size / self.crop_pct)
        resized = max(1, full * height // side), max(1, full * width // side)
        top, left = (round(over / 2) if (over := side - self.size) > 0 else -(-over // 2) for side in resized)
        return resized, (top, left)

    def image(self, image: "Image") -> "Image":
        """The square of an image."""
        from PIL import Image

        longest = STRIP * min(image.size)
        if self.resize == "crop" and max(image.size) > longest:  # resized, all of it may not fit into memory
            x, y = (max(0, side - longest) // 2 for side in image.size)
            image = image.crop((x, y, image.width - x, image.height - y))
        (height, width), (top, left) = self.fitted(image.height, image.width)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling[self.interpolation.upper()])
        square = left, top, left + self.size, top + self.size
        return image if square == (0, 0, *image.size) else image.crop(square)

    def tensor(self, value_HW: "Tensor", resized: Callable[["Tensor", Size], "Tensor"]) -> "Tensor":
        """The squares of images or masks (..., H, W), `resized` and cropped or padded."""
        from torch.nn import functional as F

        (height, width), (top, left) = self.fitted(value_HW.shape[-2], value_HW.shape[-1])
        edges = [-left, self.size - width + left, -top, self.size - height + top]  # below 0, pixels are cut off
        value_HW = resized(value_HW, (height, width))
        return F.pad(value_HW, edges) if any(edges) else value_HW

    def mask(self, mask_HW: NDArray[np.integer], size: Size | None = None) -> "Image":
        """Class numbers as an 8-bit image, or 16-bit from 255 on; in the width and height of an image that became the square, on request.

        What was cropped is 255, or 65535 with 16 bits.
        """
        from PIL import Image

        image = Image.fromarray(mask_HW.astype(np.uint8 if mask_HW.max() < 255 else np.uint16))
        if size is None:
            return image
        (height, width), (top, left) = self.fitted(size[1], size[0])
        place, fill = (width / size[0], 0, -left, 0, height / size[1], -top), 255 if image.mode == "L" else 65535
        return image.transform(size, Image.Transform.AFFINE, place, Image.Resampling.NEAREST, fillcolor=fill)


def upright(image: "Image", *, channels: int, least: int = 0) -> "Image":
    """An image of 8 bits, RGB or grey, upright by its EXIF orientation. `least`: pixels of its shorter side that suffice; 0: all are needed."""
    from PIL import Image, ImageOps

    check_depth(image)
    scale = TO_8_BITS.get(str(tile[0][-1])) if (tile := getattr(image, "tile", ())) else None
    if scale and (hidden := image.info.get("transparency")) is not None:
        numbers = np.multiply(hidden, scale).astype(int).tolist()
        image.info["transparency"] = numbers if isinstance(hidden, int) else tuple(numbers)
    if least:  # a JPEG scales itself by 2, 4 or 8, which no resizing equals to one level
        image.draft(None, (least, least))
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I"):  # 16-bit grey: `convert` would clip everything above 255
        grey_HW, hidden = np.asarray(image), image.info.get("transparency", -1)
        image = Image.fromarray((np.where(grey_HW == hidden, WHITE_16, grey_HW) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, BACKGROUND), image.convert("RGBA"))
    if image.mode != (mode := "L" if channels == 1 else "RGB"):
        return image.convert(mode)
    image.load()  # while its file is open
    return image


def chw(image: Any) -> NDArray[np.uint8]:
    """image_CHW of a PIL image, or of an array (H, W, C) or (H, W): a copy, in memory as HWC."""
    pixels = np.array(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def to_array(image: "Image", *, channels: int, frame: Frame) -> NDArray[np.uint8]:
    """uint8 image_CHW in the frame."""
    return chw(frame.image(upright(image, channels=channels)))


def original_size(image: "Image") -> tuple[int, int]:
    """Width and height of an opened image that is not decoded yet, upright by its EXIF orientation."""
    from PIL import ExifTags

    width, height = image.size
    # Pillow turns TIFFs itself
    upright = image.format == "TIFF" or image.getexif().get(ExifTags.Base.Orientation, 1) < 5
    return (width, height) if upright else (height, width)


def reason(error: Exception) -> str:
    """Why a file cannot be read, in one line."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):  # its message has the address of the file's object in memory
        return "cannot identify the image format"
    return " ".join(str(error).split()) or type(error).__name__


def check_depth(image: "Image") -> None:
    # `convert` would clip everything above 255. These formats have 16 bits where Pillow says I.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PPM", "PNG")):
        raise ValueError(f"its pixels have 32 bits (mode {image.mode}), not 8 or 16")


# --- With torch, in batches ---


class Preprocess:
    """Resizes and normalises. Only bytes are copied to the device: a quarter of the size of floats."""

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
        """uint8 in 0..255 of any size to float32 in the frame, normalised."""
        import torch
        from torch.nn import functional as F

        if self.scale.device != image_BCHW.device:
            self.scale, self.shift = self.scale.to(image_BCHW.device), self.shift.to(image_BCHW.device)
        x = image_BCHW
        if x.shape[-2:] != (self.frame.size, self.frame.size):
            x = self.frame.tensor(x.float(), partial(F.interpolate, mode=self.frame.interpolation, antialias=True))
            x = x.clamp_(0, 255) if self.frame.interpolation == "bicubic" else x  # which it exceeds
        # Copy into a tensor of that format: `contiguous` does not change images of one channel, which have both formats, and
        # then the strides of the first weights would decide in which one a network computes.
        out = torch.empty_like(x, dtype=torch.float32, memory_format=self.memory_format)
        return torch.addcmul(self.shift, x, self.scale, out=out)


def resize_nearest(masks: "Tensor", size: tuple[int, int]) -> "Tensor":
    """...HW of any type to `size` without mixing values, which F.interpolate lacks for integers other than bytes."""
    import torch

    (h, w), (height, width) = masks.shape[-2:], size
    y_H, x_W = (2 * torch.arange(side, device=masks.device) + 1 for side in size)
    return masks[..., (y_H * h // (2 * height))[:, None], x_W * w // (2 * width)]
