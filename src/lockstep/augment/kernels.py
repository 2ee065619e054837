"""What operations do to the pixels of a batch, each image by its own parameters.

Parameters are arrays, drawn on the host; tensors are on the batch's device. A kernel computes element by element, or image by image:
matrix products and reductions of floats may round differently in batches of another size, and then a sample would depend on how
many others share its micro-batch.
"""

# B batch · C channel · H W pixel

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from lockstep.augment.operation import Draws
from lockstep.data.dataset import Indices

Array = NDArray[Any]


def on(image: Tensor, array: Array) -> Tensor:
    """Parameters on the device of an image, without waiting for it."""
    return torch.from_numpy(array).to(image.device, non_blocking=True)


# --- Moving pixels ---


def flipped(value_BCHW: Tensor, mirrored_B: Array, *, dim: int) -> Tensor:
    rows = on(value_BCHW, np.flatnonzero(mirrored_B))
    return value_BCHW.index_copy(0, rows, value_BCHW.index_select(0, rows).flip(dim))


def shifted(value_BCHW: Tensor, corner_B2: Indices, *, pixels: int, fill: float) -> Tensor:
    """The part of each image, padded by `pixels`, whose upper left corner is at (y, x)."""
    (h, w), corners = value_BCHW.shape[-2:], on(value_BCHW, corner_B2)
    windows = F.pad(value_BCHW, [pixels] * 4, value=fill).unfold(2, h, 1).unfold(3, w, 1)
    return windows[torch.arange(len(corners), device=corners.device), :, corners[:, 0], corners[:, 1]]


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


# --- Mixing images ---


def weighted_mean(value: Tensor, other: Tensor, share_B: Array) -> Tensor:
    share = on(value, share_B).view(-1, *[1] * (value.dim() - 1))
    mean = (value * share).add_(other * (1 - share))
    return (mean if value.is_floating_point() else mean.round_()).to(value.dtype)
