"""Operations for batches of images: shift, flip, random erasing. Masks move with their images."""

# B batch · C channel · H W pixel · T attempt

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.augment.operation import (
    PAIR,
    Byte,
    Checked,
    Count,
    Draws,
    GeometricOperation,
    MaskValue,
    PixelOperation,
    Positive,
    Probability,
    on,
)
from lockstep.data.dataset import Indices

if TYPE_CHECKING:
    from torch import Tensor

# --- Operations that move pixels ---


@dataclass(kw_only=True, eq=False)
class Shift(Checked, GeometricOperation):
    """Shifts by up to `pixels` in each direction, padded with black: CIFAR-10's usual random crop (He et al. 2016)."""

    uncovers = True
    pixels: Count
    mask_fill: MaskValue = None
    image_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size is not None and self.pixels >= self.image_size:
            raise ValueError(
                f"pixels={self.pixels} would shift images of {self.image_size} pixels out of view. Set a number below {self.image_size}"
            )

    def plan(self, height: int, width: int, draws: Draws) -> Indices:
        """The upper left corner of the result in the padded image. The shift is `pixels` minus this corner."""
        return 2 * self.pixels - draws.below(2 * self.pixels + 1, (2,))

    def move(self, value_BCHW: "Tensor", plan: Indices, *, is_mask: bool) -> "Tensor":
        import torch

        fill = (self.mask_fill or 0) if is_mask else 0
        (h, w), corner_B2 = value_BCHW.shape[-2:], on(value_BCHW.device, plan)
        padded = torch.nn.functional.pad(value_BCHW, [self.pixels] * 4, value=fill)
        index_B = torch.arange(len(corner_B2), device=padded.device)
        return padded.unfold(2, h, 1).unfold(3, w, 1)[index_B, :, corner_B2[:, 0], corner_B2[:, 1]]


@dataclass(kw_only=True, eq=False)
class Flip(Checked, GeometricOperation):
    """Mirrors images: left to right, and upside down, each with its probability."""

    horizontal: Probability = 0.5
    vertical: Probability = 0.0

    def plan(self, height: int, width: int, draws: Draws) -> dict[int, NDArray[np.bool_]]:
        """Which samples are mirrored, by dimension."""
        mirrored = {-1: draws.chance(self.horizontal), -2: draws.chance(self.vertical)}
        return {dim: chosen_B for dim, chosen_B in mirrored.items() if chosen_B.any()}

    def move(self, value_BCHW: "Tensor", plan: dict[int, NDArray[np.bool_]], *, is_mask: bool) -> "Tensor":
        for dim, mirrored_B in plan.items():
            rows = on(value_BCHW.device, np.flatnonzero(mirrored_B))
            value_BCHW = value_BCHW.index_copy(0, rows, value_BCHW.index_select(0, rows).flip(dim))
        return value_BCHW


# --- Operations that change the values of pixels ---

ATTEMPTS = 10  # to find a box that fits into the image


@dataclass(kw_only=True, eq=False)
class RandomErasing(Checked, PixelOperation):
    """Covers a box of a fraction of the image (`scale`) with noise or one value (Zhong et al. 2020).

    Chooses boxes as torchvision's RandomErasing does. Masks do not change.
    """

    probability: Probability = 0.25
    scale: Annotated[Sequence[Probability], *PAIR] = (0.02, 1 / 3)
    ratio: Annotated[Sequence[Positive], *PAIR] = (0.3, 3.3)
    fill: Literal["noise"] | Byte = "noise"

    def boxes(self, height: int, width: int, draws: Draws) -> Indices:
        """box_B4: top, left, height, width. A box of 0 x 0 erases nothing."""
        area_BT, log_BT = draws.uniform(shape=(2, ATTEMPTS)).astype(np.float64).swapaxes(0, 1)
        area_BT = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * area_BT)
        low, high = map(math.log, self.ratio)
        ratio_BT = np.exp(low + (high - low) * log_BT)  # of height to width, uniform in its logarithm
        sides_2BT = np.sqrt([area_BT * ratio_BT, area_BT / ratio_BT]).round().astype(np.int64)
        fits_BT = (sides_2BT[0] < height) & (sides_2BT[1] < width)
        first_B, erased_B = fits_BT.argmax(1), draws.chance(self.probability) & fits_BT.any(1)
        h_B, w_B = sides_2BT[:, draws.place_B, first_B] * erased_B
        return np.stack([draws.below(height - h_B + 1), draws.below(width - w_B + 1), h_B, w_B], 1)

    def change(self, image_BCHW: "Tensor", draws: Draws) -> "Tensor":
        result, (h, w) = image_BCHW.clone(), image_BCHW.shape[-2:]
        for index, (top, left, height, width) in enumerate(self.boxes(h, w, draws).tolist()):
            if height:
                box, fill = result[index, :, top : top + height, left : left + width], self.fill
                box[:] = draws.tensor(draws.noise(index, box.numel())).view(box.shape) if fill == "noise" else fill
        return result
