"""Images to a network's input: opened files to bytes of one size with Pillow, bytes to normalised floats on their device; masks back.

Imports nothing of Lockstep: an exported folder has a copy of this file. Free of torch until a batch comes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

# B batch · C channel · H W pixel

# --- With Pillow ---

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")  # of image files
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


def reason(error: Exception) -> str:
    """Why a file cannot be read, in one line."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):  # its message has the address of the file's object in memory
        return "cannot identify the image format"
    return " ".join(str(error).split()) or type(error).__name__


def refuse_numbers(image: "Image") -> None:
    if image.mode in ("I", "F"):  # `convert` would clip everything above 255
        raise ValueError(f"its pixels have 32 bits (mode {image.mode}), not 8 or 16")


# --- With torch, in batches ---


class Preprocess:
    """Resizes (bilinear, with antialiasing) and normalises. Only bytes are copied to the device: a quarter of the size of floats."""

    def __init__(
        self, *, image_size: int, mean: Sequence[float], std: Sequence[float], channels_last: bool = False
    ) -> None:
        import torch

        self.image_size = image_size
        # (x / 255 - mean) / std as one multiplication and one addition
        self.scale = torch.tensor([1 / (255 * s) for s in std]).view(-1, 1, 1)
        self.shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(-1, 1, 1)
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, image_BCHW: "Tensor") -> "Tensor":
        """uint8 in 0..255 of any size to float32 of `image_size`, normalised."""
        import torch
        from torch.nn import functional as F

        if self.scale.device != image_BCHW.device:
            self.scale, self.shift = self.scale.to(image_BCHW.device), self.shift.to(image_BCHW.device)
        x = image_BCHW
        if x.shape[-2:] != (self.image_size, self.image_size):
            x = F.interpolate(x.float(), size=(self.image_size, self.image_size), mode="bilinear", antialias=True)
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
