"""Random boxes within images, chosen for a whole batch at once as torchvision chooses one."""

# B batch · T attempt · H W pixel

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.augment.draws import Draws, wide

Box = tuple[Tensor, Tensor, Tensor, Tensor]  # top_B, left_B, height_B, width_B


def random_sides(
    draws: Draws, area: int, scale: Sequence[float], ratio: Sequence[float], attempts: int
) -> tuple[Tensor, Tensor]:
    """width_BT and height_BT of boxes with a share of `area` and a ratio of width to height, uniform in its logarithm."""
    share_BT, log_BT = wide(draws.uniform(shape=(2, attempts))).unbind(1)
    area_BT = area * (scale[0] + (scale[1] - scale[0]) * share_BT)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    ratio_BT = (low + (high - low) * log_BT).exp()
    return (area_BT * ratio_BT).sqrt().round().long(), (area_BT / ratio_BT).sqrt().round().long()


def first_that_fits(fits_BT: Tensor, value_BT: Tensor, otherwise: int) -> Tensor:
    """value_B of the first attempt that fits."""
    first_B1 = fits_BT.int().argmax(1, keepdim=True)
    return value_BT.gather(1, first_B1)[:, 0].where(fits_BT.any(1), otherwise)


def inside(box: Box, height: int, width: int) -> Tensor:
    """inside_BHW: the pixels in each image's box."""
    top_B, left_B, height_B, width_B = box
    y_H, x_W = torch.arange(height, device=top_B.device), torch.arange(width, device=top_B.device)
    rows_BH = (y_H >= top_B[:, None]) & (y_H < (top_B + height_B)[:, None])
    columns_BW = (x_W >= left_B[:, None]) & (x_W < (left_B + width_B)[:, None])
    return rows_BH[:, :, None] & columns_BW[:, None, :]
