"""An opened image to bytes of one size, and a mask of that size back to an image, with Pillow. An exported folder has a copy of this file."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

# Let JPEG scale by 2, 4 or 8 itself, down to at least this many times the target size: 4000 x 3000 took a third of the time.
REDUCING_GAP = 2


def to_array(image: "Image", *, channels: int, size: int) -> NDArray[np.uint8]:
    """uint8 image_CHW of `size` x `size`, upright by its EXIF orientation: bilinear, with antialiasing."""
    from PIL import Image, ImageOps

    image.draft(None, (REDUCING_GAP * size, REDUCING_GAP * size))
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16"):  # 16-bit grey: `convert` would clip everything above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    refuse_numbers(image)
    image = image.convert("L" if channels == 1 else "RGB")
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def original_size(image: "Image") -> tuple[int, int]:
    """Width and height of an opened image that is not decoded yet, upright by its EXIF orientation."""
    from PIL import ExifTags

    width, height = image.size
    # Pillow turns TIFFs itself
    upright = image.format == "TIFF" or image.getexif().get(ExifTags.Base.Orientation, 1) < 5
    return (width, height) if upright else (height, width)


def mask_image(mask_HW: NDArray[np.integer], size: tuple[int, int] | None = None) -> "Image":
    """Class numbers as an 8-bit image, or 16-bit above 255, in another width and height on request."""
    from PIL import Image

    image = Image.fromarray(mask_HW.astype(np.uint8 if mask_HW.max() < 256 else np.uint16))
    return image.resize(size, Image.Resampling.NEAREST) if size else image


def refuse_numbers(image: "Image") -> None:
    if image.mode in ("I", "F"):  # `convert` would clip everything above 255
        raise ValueError(f"its pixels have 32 bits (mode {image.mode}), not 8 or 16")
