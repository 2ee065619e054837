"""Moves the pixels of each image of a batch by its own parameters, in one pass for all of them.

Elementwise arithmetic only: matrix products and fused functions may round differently in batches of another size, and then a
sample would depend on how many others share its micro-batch.
"""

# B batch · C channel · H W pixel · K tap, one of the pixels that make a new one

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.augment.boxes import Box
from lockstep.augment.draws import wide


def to_bytes(image: Tensor) -> Tensor:
    return image.round().clamp(0, 255).to(torch.uint8)


def rows_and_columns(value_BCHW: Tensor, y_BH: Tensor, x_BW: Tensor) -> Tensor:
    """The rows y_BH and the columns x_BW of each image."""
    b, c, _, w = value_BCHW.shape
    rows = value_BCHW.gather(2, y_BH[:, None, :, None].expand(b, c, y_BH.shape[1], w))
    return rows.gather(3, x_BW[:, None, None, :].expand(b, c, y_BH.shape[1], x_BW.shape[1]))


def shift(value_BCHW: Tensor, down_B: Tensor, right_B: Tensor, most: int, *, fill: float) -> Tensor:
    """Shifts by at most `most` pixels."""
    h, w = value_BCHW.shape[-2:]
    y_H, x_W = torch.arange(h, device=down_B.device), torch.arange(w, device=down_B.device)
    padded = F.pad(value_BCHW, (most, most, most, most), value=fill)
    return rows_and_columns(padded, y_H + (most - down_B)[:, None], x_W + (most - right_B)[:, None])


def crop_nearest(value_BCHW: Tensor, box: Box, size: tuple[int, int]) -> Tensor:
    """Boxes resized without mixing values, as torchvision's NEAREST_EXACT does."""
    top_B, left_B, height_B, width_B = box

    def places(start_B: Tensor, length_B: Tensor, out: int) -> Tensor:
        middle = 2 * torch.arange(out, device=start_B.device) + 1
        return start_B[:, None] + middle * length_B[:, None] // (2 * out)

    return rows_and_columns(value_BCHW, places(top_B, height_B, size[0]), places(left_B, width_B, size[1]))


def taps(start_B: Tensor, length_B: Tensor, out: int, whole: int) -> tuple[Tensor, Tensor]:
    """place_BOK and weight_BOK of the pixels that make each of `out` new ones: a triangle as wide as a new pixel, at least two.

    The arithmetic of F.interpolate with mode="bilinear" and antialias=True.
    """
    scale_B1 = (length_B.float() / out)[:, None]
    support_B1 = scale_B1.clamp(min=1)
    centre_BO = scale_B1 * (torch.arange(out, device=start_B.device) + 0.5)
    first_BO = (centre_BO - support_B1 + 0.5).floor().clamp(min=0).long()
    count = math.ceil(2 * max(1, whole / out))  # of places within the widest triangle
    place_BOK = first_BO[:, :, None] + torch.arange(count, device=start_B.device)
    distance_BOK = (place_BOK + 0.5 - centre_BO[:, :, None]).abs()
    inside_BOK = place_BOK < length_B[:, None, None]
    weight_BOK = (1 - distance_BOK / support_B1[:, :, None]).clamp(min=0) * inside_BOK
    total_BO = sum(weight_BOK.unbind(2))
    return start_B[:, None, None] + place_BOK.where(inside_BOK, 0), weight_BOK / total_BO[:, :, None]  # type: ignore[index]


def crop_resized(image_BCHW: Tensor, box: Box, size: tuple[int, int]) -> Tensor:
    """Boxes resized to `size`: bilinear, with antialiasing. float32."""
    top_B, left_B, height_B, width_B = box
    b, c, h, w = image_BCHW.shape
    y_BOK, of_y_BOK = taps(top_B, height_B, size[0], h)
    x_BOK, of_x_BOK = taps(left_B, width_B, size[1], w)
    rows = torch.zeros(b, c, size[0], w, device=image_BCHW.device)
    for y_BO, weight_BO in zip(y_BOK.unbind(2), of_y_BOK.unbind(2), strict=True):
        taken = image_BCHW.gather(2, y_BO[:, None, :, None].expand(b, c, size[0], w))
        rows += taken * weight_BO[:, None, :, None]
    result = torch.zeros(b, c, *size, device=image_BCHW.device)
    for x_BO, weight_BO in zip(x_BOK.unbind(2), of_x_BOK.unbind(2), strict=True):
        result += rows.gather(3, x_BO[:, None, None, :].expand(b, c, *size)) * weight_BO[:, None, None, :]
    return result


def rotation(radians_B: Tensor) -> Tensor:
    """matrix_B23 of `affine`, counterclockwise."""
    cos_B, sin_B = wide(radians_B).cos().float(), wide(radians_B).sin().float()
    zero_B = torch.zeros_like(cos_B)
    return torch.stack([cos_B, -sin_B, zero_B, sin_B, cos_B, zero_B], 1).view(-1, 2, 3)


def sources(matrix_B23: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """y_BHW and x_BHW: where each new pixel comes from. `matrix` maps places (x, y, 1), counted from the image's centre."""
    x_W = torch.arange(width, device=matrix_B23.device) - (width - 1) / 2
    y_H1 = (torch.arange(height, device=matrix_B23.device) - (height - 1) / 2)[:, None]
    rows = matrix_B23[:, :, :, None, None].unbind(1)
    x_BHW, y_BHW = (a * x_W + (b * y_H1 + c) for a, b, c in (row.unbind(1) for row in rows))
    return y_BHW + (height - 1) / 2, x_BHW + (width - 1) / 2


def at(value_BCHW: Tensor, y_BHW: Tensor, x_BHW: Tensor, fill: float) -> Tensor:
    """The values at whole places (given as floats), and `fill` outside of the images."""
    b, c, h, w = value_BCHW.shape
    inside_BHW = (y_BHW >= 0) & (y_BHW < h) & (x_BHW >= 0) & (x_BHW < w)
    place_BHW = (y_BHW.clamp(0, h - 1) * w + x_BHW.clamp(0, w - 1)).long()
    taken = value_BCHW.reshape(b, c, h * w).gather(2, place_BHW.view(b, 1, -1).expand(b, c, -1)).view(b, c, h, w)
    return taken.where(inside_BHW[:, None], fill)


def affine_nearest(value_BCHW: Tensor, matrix_B23: Tensor, fill: float) -> Tensor:
    y_BHW, x_BHW = sources(matrix_B23, *value_BCHW.shape[-2:])
    return at(value_BCHW, y_BHW.round(), x_BHW.round(), fill).to(value_BCHW.dtype)


def affine_bilinear(image_BCHW: Tensor, matrix_B23: Tensor, fill: float) -> Tensor:
    """float32."""
    y_BHW, x_BHW = sources(matrix_B23, *image_BCHW.shape[-2:])
    top_BHW, left_BHW = y_BHW.floor(), x_BHW.floor()
    result = torch.zeros(image_BCHW.shape, device=image_BCHW.device)
    for y in (0, 1):
        of_y_BHW = (y_BHW - top_BHW) if y else 1 - (y_BHW - top_BHW)
        for x in (0, 1):
            weight_BHW = of_y_BHW * ((x_BHW - left_BHW) if x else 1 - (x_BHW - left_BHW))
            result += at(image_BCHW, top_BHW + y, left_BHW + x, fill) * weight_BHW[:, None]
    return result
