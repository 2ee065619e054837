"""Small images for a page, as data URIs."""

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 128  # pixels of a thumbnail, at most
# Colours of the classes of a mask: those of Okabe and Ito, which colour-blind people can tell apart.
COLOURS = np.array(
    [[0, 0, 0], [230, 159, 0], [86, 180, 233], [0, 158, 115], [240, 228, 66], [0, 114, 178], [213, 94, 0], [204, 121, 167]],
    np.float32,
)  # fmt: skip
OPACITY = 0.55


def restored(input_BCHW: Any, about: Mapping[str, Any]) -> Any:
    """The bytes of images without their normalisation, on the CPU; None if they are no images, or `about` does not tell it."""
    mean, std = about.get("mean"), about.get("std")
    if input_BCHW.dim() != 4 or not mean or not std or len(mean) != input_BCHW.shape[1]:
        return None
    image_BCHW = input_BCHW.detach().float().cpu()
    mean_C, std_C = (image_BCHW.new_tensor(each).view(-1, 1, 1) for each in (mean, std))
    return ((image_BCHW * std_C + mean_C) * 255).round().clamp(0, 255).byte()


def thumbnail(image_CHW: Any) -> Image.Image:
    array = np.asarray(image_CHW)
    image = Image.fromarray(array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0)))
    if max(image.size) > SIDE:
        image.thumbnail((SIDE, SIDE))
    return image


def overlaid(image_CHW: Any, classes_HW: Any, ignored: int | None = None) -> Image.Image:
    """The mask over a thumbnail of the image."""
    image = np.asarray(thumbnail(image_CHW).convert("RGB"))
    height, width = image.shape[:2]
    classes = np.asarray(classes_HW)
    rows, columns = (np.arange(n) * size // n for n, size in ((height, classes.shape[0]), (width, classes.shape[1])))
    return coloured(image, classes[rows[:, None], columns], ignored)


def coloured(image_HW3: NDArray[np.uint8], classes: NDArray[Any], ignored: int | None = None) -> Image.Image:
    """The mask over the image; class 0 and what is ignored stay clear."""
    image = image_HW3.astype(np.float32)
    drawn = ((classes != 0) & (classes != ignored))[..., None]
    colour = COLOURS[np.where(classes > 0, (classes - 1) % (len(COLOURS) - 1) + 1, 0)]
    return Image.fromarray(np.where(drawn, OPACITY * colour + (1 - OPACITY) * image, image).round().astype(np.uint8))


def data_uri(image: Image.Image) -> str:
    """PNG of few pixels, which a browser enlarges without blurring; JPEG of many."""
    few = max(image.size) <= 64
    file = io.BytesIO()
    image.save(file, "PNG" if few else "JPEG", **({"optimize": True} if few else {"quality": 82}))
    return f"data:image/{'png' if few else 'jpeg'};base64,{base64.b64encode(file.getvalue()).decode()}"
