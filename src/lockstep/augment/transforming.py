"""What a policy's magnitudes do to a batch of images: one matrix, one table for each channel, two blends."""

# B batch · C channel · H W pixel · L level of 256

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.augment import pixels
from lockstep.augment.draws import wide


def matrix(magnitudes: Mapping[str, Tensor], height: int, width: int) -> Tensor:
    """matrix_B23 of resampling's `affine`: the identity in samples without a geometric operation."""
    nothing_B = torch.zeros_like(next(iter(magnitudes.values())), dtype=torch.float32)
    of = {name: magnitudes.get(name, nothing_B) for name in ("shear_x", "shear_y", "translate_x", "translate_y")}
    radians_B = wide(magnitudes.get("rotate", nothing_B)) * (math.pi / 180)
    cos_B, sin_B = radians_B.cos().float(), radians_B.sin().float()
    # shears leave the upper left corner in its place
    right_B = of["shear_x"] * (height / 2) - of["translate_x"]
    down_B = of["shear_y"] * (width / 2) - of["translate_y"]
    entries = [cos_B, of["shear_x"] - sin_B, right_B, of["shear_y"] + sin_B, cos_B, down_B]
    return torch.stack(entries, 1).view(-1, 2, 3)


def recolored(image_BCHW: Tensor, magnitudes: Mapping[str, Tensor]) -> Tensor:
    """Bytes. At most one operation of each sample is not neutral, so their order does not matter."""
    image = image_BCHW.float()
    table_BCL = table(image, magnitudes)
    result = image if table_BCL is None else pixels.looked_up(image, table_BCL)
    for name, change in (("color", pixels.saturation), ("sharpness", pixels.sharpness)):
        result = change(result, magnitudes[name]) if name in magnitudes else result
    return result.to(torch.uint8)


def table(image: Tensor, magnitudes: Mapping[str, Tensor]) -> Tensor | None:
    """table_BCL of the operations that change each value for itself; None if there are none."""
    level = torch.arange(pixels.LEVELS, device=image.device).float().expand(*image.shape[:2], 1, -1)
    result = level
    if (factor_B := magnitudes.get("brightness")) is not None:
        result = pixels.brightness(result, factor_B)
    if (factor_B := magnitudes.get("contrast")) is not None:
        result = pixels.blend(result, pixels.mean_grey(image), factor_B)
    if (bits_B := magnitudes.get("posterize")) is not None:
        step = pixels.of_batch(1 << (8 - bits_B.long()))
        result = (result.long() // step * step).float()
    if (threshold_B := magnitudes.get("solarize")) is not None:
        result = (255 - result).where(result >= pixels.of_batch(threshold_B), result)
    if (inverted_B := magnitudes.get("invert")) is not None:
        result = (255 - result).where(pixels.of_batch(inverted_B), result)
    for name, of_image in (("autocontrast", pixels.stretched), ("equalize", pixels.equalized)):
        if (chosen_B := magnitudes.get(name)) is not None:
            result = of_image(image)[:, :, None].where(pixels.of_batch(chosen_B), result)
    return None if result is level else result[:, :, 0]
