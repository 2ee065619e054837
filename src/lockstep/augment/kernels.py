"""What operations do to the pixels of a batch, each image by its own parameters.

Parameters are arrays, drawn on the host; tensors are on the batch's device. A kernel computes element by element, or image by image:
matrix products and reductions of floats may round differently in batches of another size, and then a sample would depend on how
many others share its micro-batch.
"""

# B batch · C channel · H W pixel · N some images of a batch

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as tv

from lockstep.augment.operation import Draws
from lockstep.data.dataset import Indices
from lockstep.data.pixels import resize_nearest

Array = NDArray[Any]
# Values of a slice. At 224 px, 32 images: a rotation takes 34 ms in slices and 39 with the whole batch at once, brightness 9 and 25.
CACHED = 2**17


def sliced(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """On a CPU, runs a kernel on as many images at a time as its cache holds. Positional arguments have a row for each image."""

    @wraps(kernel)
    def in_slices(*rows_B: Tensor | Array, **options: Any) -> Tensor:
        image = rows_B[0]
        count = max(1, CACHED // max(1, image[0].numel())) if image.is_cpu else len(image)  # type: ignore[union-attr]
        if count >= len(image):
            return kernel(*rows_B, **options)
        slices = [slice(first, first + count) for first in range(0, len(image), count)]
        return torch.cat([kernel(*(each[rows] for each in rows_B), **options) for rows in slices])

    return in_slices


def on(image: Tensor, array: Array) -> Tensor:
    """Parameters on the device of an image, without waiting for it."""
    return torch.from_numpy(array).to(image.device, non_blocking=True)


def of_images(image: Tensor, array_B: Array) -> Tensor:
    """One number for each image: (B, 1, 1, 1)."""
    return on(image, array_B).view(-1, 1, 1, 1)


# --- Moving pixels ---


def flipped(value_BCHW: Tensor, mirrored_B: Array, *, dim: int) -> Tensor:
    rows = on(value_BCHW, np.flatnonzero(mirrored_B))
    return value_BCHW.index_copy(0, rows, value_BCHW.index_select(0, rows).flip(dim))


@sliced
def shifted(value_BCHW: Tensor, corner_B2: Indices, *, pixels: int, fill: float) -> Tensor:
    """The part of each image, padded by `pixels`, whose upper left corner is at (y, x)."""
    (h, w), corners = value_BCHW.shape[-2:], on(value_BCHW, corner_B2)
    windows = F.pad(value_BCHW, [pixels] * 4, value=fill).unfold(2, h, 1).unfold(3, w, 1)
    return windows[torch.arange(len(corners), device=corners.device), :, corners[:, 0], corners[:, 1]]


def cropped(value_BCHW: Tensor, box_B4: Indices, *, size: tuple[int, int], is_mask: bool) -> Tensor:
    """Boxes (top, left, height, width) resized to `size`: images with antialiasing, masks without mixing values.

    Image by image: torch resizes a batch of boxes of one size only.
    """
    boxes = [value_BCHW[i : i + 1, :, y : y + h, x : x + w] for i, (y, x, h, w) in enumerate(box_B4.tolist())]
    if is_mask:
        return torch.cat([resize_nearest(box, size) for box in boxes])
    if value_BCHW.is_cpu:
        return torch.cat([F.interpolate(box, size=size, mode="bilinear", antialias=True) for box in boxes])
    # elsewhere torch resizes floats only
    return to_bytes(torch.cat([F.interpolate(b.float(), size=size, mode="bilinear", antialias=True) for b in boxes]))


def to_bytes(image: Tensor) -> Tensor:
    return image.round().clamp(0, 255).to(torch.uint8)


@sliced
def transformed(value_BCHW: Tensor, matrix_B23: Array, *, interpolation: str, fill: float) -> Tensor:
    """Affine: `matrix` maps the places (x, y, 1) of new pixels to old ones, both counted from the image's centre."""
    b, c, h, w = value_BCHW.shape
    x_W, y_H = (torch.arange(side, device=value_BCHW.device) - (side - 1) / 2 for side in (w, h))
    rows = on(value_BCHW, matrix_B23)[:, :, :, None, None].unbind(1)
    x_BHW, y_BHW = (of_x * x_W + (of_y * y_H[:, None] + shift) for of_x, of_y, shift in (row.unbind(1) for row in rows))
    if interpolation == "bilinear":
        grid_BHW2 = torch.stack([x_BHW * (2 / w), y_BHW * (2 / h)], 3)
        return to_bytes(F.grid_sample(value_BCHW.float() - fill, grid_BHW2, align_corners=False) + fill)
    x_BHW, y_BHW = (x_BHW + (w - 1) / 2).round(), (y_BHW + (h - 1) / 2).round()
    inside_BHW = (y_BHW >= 0) & (y_BHW < h) & (x_BHW >= 0) & (x_BHW < w)
    place_BHW = (y_BHW.clamp(0, h - 1) * w + x_BHW.clamp(0, w - 1)).long()
    taken = value_BCHW.reshape(b, c, -1).gather(2, place_BHW.view(b, 1, -1).expand(b, c, -1)).view(b, c, h, w)
    return taken.where(inside_BHW[:, None], fill).to(value_BCHW.dtype)


@sliced
def pasted(value: Tensor, other: Tensor, box_B4: Indices) -> Tensor:
    """`other` within each image's box: (B, ..., H, W)."""
    height, width = value.shape[-2:]
    top_B1, left_B1, height_B1, width_B1 = on(value, box_B4)[:, :, None].unbind(1)
    y_H, x_W = (torch.arange(side, device=value.device) for side in (height, width))
    rows_BH = (y_H >= top_B1) & (y_H < top_B1 + height_B1)
    columns_BW = (x_W >= left_B1) & (x_W < left_B1 + width_B1)
    inside_BHW = rows_BH[:, :, None] & columns_BW[:, None, :]
    return other.where(inside_BHW.view(-1, *[1] * (value.dim() - 3), height, width), value)


def erased(image_BCHW: Tensor, box_B4: Indices, *, fill: int | str, draws: Draws) -> Tensor:
    """Boxes filled with one value, or with noise."""
    result = image_BCHW.clone()
    for place, (top, left, height, width) in enumerate(box_B4.tolist()):
        if height:
            box = result[place, :, top : top + height, left : left + width]
            box[:] = on(box, draws.noise(place, box.numel())).view(box.shape) if isinstance(fill, str) else fill
    return result


# --- Changes of colour, as torchvision computes them for bytes ---
#
# Images are whole numbers from 0 to 255 in float32. Like bytes, results are rounded down after each change. Sums of whole numbers
# have no order.


def blend(image: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """`image` with a factor of 1, `other` with 0, and beyond."""
    return (image * factor).add_(other * (1 - factor)).clamp_(0, 255).floor_()


def grey(image_BCHW: Tensor) -> Tensor:
    """grey_B1HW: the brightness of colours."""
    if image_BCHW.shape[1] == 1:
        return image_BCHW
    r, g, b = image_BCHW.unbind(1)
    return (r * 0.2989 + g * 0.587 + b * 0.114).floor()[:, None]


def brightness(image: Tensor, factor: Tensor) -> Tensor:
    return (image * factor).clamp_(0, 255).floor_()


def contrast(image: Tensor, factor: Tensor) -> Tensor:
    total = grey(image).sum((1, 2, 3), keepdim=True, dtype=torch.int64)
    return blend(image, total.float() / (image.shape[2] * image.shape[3]), factor)


def saturation(image: Tensor, factor: Tensor) -> Tensor:
    return image if image.shape[1] == 1 else blend(image, grey(image), factor)


def sharpness(image: Tensor, factor: Tensor) -> Tensor:
    """A blend with the image smoothed by a kernel of 3 x 3; its edges stay."""
    if min(image.shape[-2:]) < 3:
        return image
    inner = image[:, :, 1:-1, 1:-1]
    rows = image[:, :, :-2] + image[:, :, 1:-1] + image[:, :, 2:]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * inner
    result = image.clone()
    result[:, :, 1:-1, 1:-1] = blend(inner, (total / 13).round(), factor)
    return result


def hue(image_BCHW: Tensor, turn: Tensor) -> Tensor:
    """Turns the hues by a fraction of the circle: to HSV and back (Pillow's formulas)."""
    if image_BCHW.shape[1] == 1:
        return image_BCHW
    image = image_BCHW / 255
    r, g, b = image.unbind(1)
    value, least = image.amax(1), image.amin(1)
    spread = value - least
    divisor = spread.where(spread > 0, 1.0)
    of_red, of_green, of_blue = (b - g) / divisor * -1, (b - r) / divisor + 2, (r - g) / divisor + 4
    turned = of_red.where(value == r, of_green.where(value == g, of_blue)) / 6 + turn[:, 0]
    sixths = (turned - turned.floor()) * 6
    channels = []
    for offset in (5.0, 3.0, 1.0):
        place = sixths + offset
        place = place - 6 * (place >= 6)
        channels.append(value - spread * torch.minimum(place, 4 - place).clamp(0, 1))
    return (torch.stack(channels, 1) * (256 - 1e-3)).floor().clamp(0, 255)


BLENDS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": brightness,
    "contrast": contrast,
    "saturation": saturation,
    "color": saturation,
    "hue": hue,
    "sharpness": sharpness,
}


# Of bytes, to bytes. torchvision takes batches of 1 or 3 channels, which it changes each by itself.
TABLES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "posterize": lambda image, bits: image & (256 - 2 ** (8 - bits)).to(torch.uint8),
    "solarize": lambda image, threshold: image.where(image < threshold.ceil().to(torch.uint8), 255 - image),
    "autocontrast": lambda image, _: tv.autocontrast(image.flatten(0, 1)[:, None]).view(image.shape),
    "equalize": lambda image, _: tv.equalize(image.flatten(0, 1)[:, None]).view(image.shape),
    "invert": lambda image, _: 255 - image,
}


@sliced
def recolored(image_BCHW: Tensor, factor_BN: Array, *, names: list[str]) -> Tensor:
    """Each change to all images, in this order."""
    image = image_BCHW.float()
    for name, factor_B in zip(names, factor_BN.T, strict=True):
        image = BLENDS[name](image, of_images(image, np.ascontiguousarray(factor_B)))
    return image.to(torch.uint8)


@sliced
def each_by_its_own(image_BCHW: Tensor, name_B: Array, strength_B: Array, matrix_B23: Array, **options: Any) -> Tensor:
    """The change that `name` says: of colour by a strength, or `move` by a matrix; the images of each are a batch."""
    groups = {name: np.flatnonzero(name_B == name) for name in np.unique(name_B).tolist()}
    parts = []
    for name, rows in groups.items():
        part_NCHW = image_BCHW.index_select(0, on(image_BCHW, rows))
        strength = of_images(image_BCHW, strength_B[rows])
        if name == "move":
            part_NCHW = transformed(part_NCHW, matrix_B23[rows], **options)
        elif name in BLENDS:
            part_NCHW = BLENDS[name](part_NCHW.float(), strength).to(torch.uint8)
        elif name in TABLES:
            part_NCHW = TABLES[name](part_NCHW, strength)
        parts.append(part_NCHW)
    return torch.cat(parts).index_select(0, on(image_BCHW, np.concatenate([*groups.values()]).argsort()))


# --- Mixing images ---


@sliced
def weighted_mean(value: Tensor, other: Tensor, share_B: Array) -> Tensor:
    share = on(value, share_B).view(-1, *[1] * (value.dim() - 1))
    mean = value * share + other * (1 - share)
    return (mean if value.is_floating_point() else mean.round()).to(value.dtype)
