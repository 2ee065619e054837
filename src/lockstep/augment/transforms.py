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
                f"pixels={self.pixels} would move whole images of {self.image_size} pixels away. Set a number below {self.image_size}"
            )

    def plan(self, height: int, width: int, draws: Draws) -> Indices:
        """The upper left corner in the padded image: a shift by `pixels` minus it."""
        return 2 * self.pixels - draws.below(2 * self.pixels + 1, (2,))

    def move(self, value_BCHW: "Tensor", plan: Indices, *, is_mask: bool) -> "Tensor":
        from lockstep.augment.kernels import shifted

        return shifted(value_BCHW, plan, pixels=self.pixels, fill=(self.mask_fill or 0) if is_mask else 0)


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
        from lockstep.augment.kernels import flipped

        for dim, mirrored_B in plan.items():
            value_BCHW = flipped(value_BCHW, mirrored_B, dim=dim)
        return value_BCHW


# --- Random boxes, chosen as torchvision chooses them ---

ATTEMPTS = 10  # at a box that fits into the image


def random_sides(draws: Draws, area: int, scale: Sequence[float], ratio: Sequence[float]) -> tuple[Indices, Indices]:
    """width_BT and height_BT of boxes with a fraction of `area` and a ratio of width to height, uniform in its logarithm."""
    area_BT, log_BT = draws.uniform(shape=(2, ATTEMPTS)).astype(np.float64).swapaxes(0, 1)
    area_BT = area * (scale[0] + (scale[1] - scale[0]) * area_BT)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    ratio_BT = np.exp(low + (high - low) * log_BT)
    return np.sqrt(area_BT * ratio_BT).round().astype(np.int64), np.sqrt(area_BT / ratio_BT).round().astype(np.int64)


def first_that_fits(fits_BT: NDArray[np.bool_], value_BT: Indices, otherwise: int) -> Indices:
    """value_B of the first attempt that fits."""
    first_B1 = fits_BT.argmax(1)[:, None]
    return np.where(fits_BT.any(1), np.take_along_axis(value_BT, first_B1, 1)[:, 0], otherwise)


@dataclass(kw_only=True, eq=False)
class RandomErasing(Checked, PixelOperation):
    """Covers a box of a fraction of the image (`scale`) with noise or one value (Zhong et al. 2020). Masks stay as they are.

    Chooses boxes as torchvision's RandomErasing does.
    """

    probability: Probability = 0.25
    scale: Annotated[Sequence[Probability], *PAIR] = (0.02, 1 / 3)
    ratio: Annotated[Sequence[Positive], *PAIR] = (0.3, 3.3)
    fill: Literal["noise"] | Byte = "noise"

    def boxes(self, height: int, width: int, draws: Draws) -> Indices:
        """box_B4: top, left, height, width. A box of 0 x 0 erases nothing."""
        # torchvision's ratio is of height to width
        h_BT, w_BT = random_sides(draws, height * width, self.scale, self.ratio)
        fits_BT = (h_BT < height) & (w_BT < width)
        erased_B = draws.chance(self.probability)
        h_B, w_B = (first_that_fits(fits_BT, side_BT, 0) * erased_B for side_BT in (h_BT, w_BT))
        return np.stack([draws.below(height - h_B + 1), draws.below(width - w_B + 1), h_B, w_B], 1)

    def change(self, image_BCHW: "Tensor", draws: Draws) -> "Tensor":
        from lockstep.augment.kernels import erased

        height, width = image_BCHW.shape[-2:]
        boxes = self.boxes(height, width, draws)
        return erased(image_BCHW, boxes, fill=self.fill, draws=draws)
