"""Operations for images: shift, flip, random resized crop, rotation, random erasing, jitter. Masks move with their images."""

# B batch · C channel · H W pixel · T attempt

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.augment.operation import (
    BYTE,
    MASK_VALUE,
    PROBABILITY,
    Draws,
    GeometricOperation,
    HostDraws,
    PixelOperation,
    Range,
    check,
)
from lockstep.data.dataset import Indices

if TYPE_CHECKING:
    from torch import Tensor

# --- Operations that move pixels ---


class Shift(GeometricOperation):
    """Shifts by up to `pixels` in each direction, padded with black: CIFAR-10's usual random crop (He et al. 2016)."""

    uncovers = True

    def __init__(self, *, pixels: int, mask_fill: int | None = None, image_size: int | None = None) -> None:
        self.pixels, self.mask_fill = pixels, mask_fill
        check(self, pixels=Range(1, whole=True), mask_fill=MASK_VALUE)
        if image_size is not None and pixels >= image_size:
            raise ValueError(
                f"pixels={pixels} would move whole images of {image_size} pixels away. Set a number below {image_size}"
            )

    def plan(self, height: int, width: int, draws: Draws) -> Indices:
        """The upper left corner in the padded image: a shift by `pixels` minus it."""
        return 2 * self.pixels - draws.host.below(2 * self.pixels + 1, (2,))

    def move(self, value_BCHW: "Tensor", plan: Indices, *, is_mask: bool) -> "Tensor":
        from lockstep.augment.kernels import shifted

        return shifted(value_BCHW, plan, pixels=self.pixels, fill=(self.mask_fill or 0) if is_mask else 0)


class Flip(GeometricOperation):
    """Mirrors images: left to right, and upside down, each with its probability."""

    def __init__(self, *, horizontal: float = 0.5, vertical: float = 0.0) -> None:
        self.horizontal, self.vertical = horizontal, vertical
        check(self, horizontal=PROBABILITY, vertical=PROBABILITY)

    def plan(self, height: int, width: int, draws: Draws) -> dict[int, NDArray[np.bool_]]:
        """Which samples are mirrored, by dimension."""
        mirrored = {-1: draws.host.chance(self.horizontal), -2: draws.host.chance(self.vertical)}
        return {dim: chosen for dim, chosen in mirrored.items() if (self.horizontal if dim == -1 else self.vertical)}

    def move(self, value_BCHW: "Tensor", plan: dict[int, NDArray[np.bool_]], *, is_mask: bool) -> "Tensor":
        from lockstep.augment.kernels import flipped

        for dim, mirrored_B in plan.items():
            value_BCHW = flipped(value_BCHW, mirrored_B, dim=dim)
        return value_BCHW


class RandomResizedCrop(GeometricOperation):
    """A box of a fraction of the image (`scale`) and an aspect ratio (`ratio`), resized to `image_size`: bilinear, with antialiasing.

    Chooses boxes as torchvision's RandomResizedCrop does (Szegedy et al. 2015). Without `image_size`, images keep their size.
    """

    def __init__(
        self,
        *,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        image_size: int | None = None,
    ) -> None:
        self.scale, self.ratio, self.image_size = list(scale), list(ratio), image_size
        check(self, scale=Range(0, 1, above=True), ratio=Range(0, above=True), image_size=Range(1, whole=True))

    def plan(self, height: int, width: int, draws: Draws) -> Indices:
        """box_B4: top, left, height, width."""
        low, high = self.ratio
        w_BT, h_BT = random_sides(draws.host, height * width, self.scale, self.ratio)
        fits_BT = (w_BT > 0) & (w_BT <= width) & (h_BT > 0) & (h_BT <= height)
        # if none fits, the largest box in the middle with a ratio that is allowed
        whole_w = round(height * high) if width / height > high else width
        whole_h = round(width / low) if width / height < low else height
        w_B, h_B = first_that_fits(fits_BT, w_BT, whole_w), first_that_fits(fits_BT, h_BT, whole_h)
        rooms, fits_B = (height - h_B, width - w_B), fits_BT.any(1)
        top_B, left_B = (np.where(fits_B, draws.host.below(room_B + 1), room_B // 2) for room_B in rooms)
        return np.stack([top_B, left_B, h_B, w_B], 1)

    def move(self, value_BCHW: "Tensor", plan: Indices, *, is_mask: bool) -> "Tensor":
        from lockstep.augment.kernels import cropped_bilinear, cropped_nearest

        height, width = value_BCHW.shape[-2:]
        size = (self.image_size or height, self.image_size or width)
        return (cropped_nearest if is_mask else cropped_bilinear)(value_BCHW, plan, size=size)


class Rotate(GeometricOperation):
    """Rotates about the centre by up to `degrees` in either direction; uncovered pixels become `fill`."""

    uncovers = True

    def __init__(
        self,
        *,
        degrees: float,
        interpolation: Literal["bilinear", "nearest"] = "bilinear",
        fill: int = 0,
        mask_fill: int | None = None,
    ) -> None:
        self.degrees, self.interpolation, self.fill, self.mask_fill = degrees, interpolation, fill, mask_fill
        check(self, degrees=Range(0, 180, above=True), fill=BYTE, mask_fill=MASK_VALUE)

    def plan(self, height: int, width: int, draws: Draws) -> NDArray[np.float32]:
        return affine_matrix({"rotate": draws.host.uniform(-self.degrees, self.degrees)}, height, width)

    def move(self, value_BCHW: "Tensor", plan: Any, *, is_mask: bool) -> "Tensor":
        from lockstep.augment.kernels import transformed

        if is_mask:
            return transformed(value_BCHW, plan, interpolation="nearest", fill=self.mask_fill or 0)
        return transformed(value_BCHW, plan, interpolation=self.interpolation, fill=self.fill)


def affine_matrix(parts: Mapping[str, NDArray[Any]], height: int, width: int) -> NDArray[np.float32]:
    """matrix_B23 of kernels.transformed. At most one part of each image is not 0: `rotate` in degrees counterclockwise,
    `translate_x` and `translate_y` in pixels, `shear_x` and `shear_y` about the upper left corner."""
    names = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
    nothing_B = np.zeros_like(next(iter(parts.values())), dtype=np.float64)
    # In float64: vectorised float32 functions differ in the last bit with a number's place in a batch.
    turn_B, shear_x, shear_y, x_B, y_B = (np.float64(parts.get(name, nothing_B)) for name in names)
    cos_B, sin_B = np.cos(np.deg2rad(turn_B)), np.sin(np.deg2rad(turn_B))
    x_row = [cos_B, shear_x - sin_B, shear_x * (height / 2) - x_B]
    y_row = [shear_y + sin_B, cos_B, shear_y * (width / 2) - y_B]
    return np.stack([*x_row, *y_row], 1).reshape(-1, 2, 3).astype(np.float32)


# --- Random boxes, chosen as torchvision chooses them ---

ATTEMPTS = 10  # at a box that fits into the image


def random_sides(
    draws: HostDraws, area: int, scale: Sequence[float], ratio: Sequence[float]
) -> tuple[Indices, Indices]:
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


class RandomErasing(PixelOperation):
    """Covers a box of a fraction of the image (`scale`) with noise or one value (Zhong et al. 2020). Masks stay as they are.

    Chooses boxes as torchvision's RandomErasing does.
    """

    def __init__(
        self,
        *,
        probability: float = 0.25,
        scale: Sequence[float] = (0.02, 1 / 3),
        ratio: Sequence[float] = (0.3, 3.3),
        fill: Literal["noise"] | int = "noise",
    ) -> None:
        self.probability, self.scale, self.ratio, self.fill = probability, list(scale), list(ratio), fill
        ranges = {"probability": PROBABILITY, "scale": PROBABILITY, "ratio": Range(0, above=True)}
        check(self, **ranges, **({} if fill == "noise" else {"fill": BYTE}))

    def boxes(self, height: int, width: int, draws: HostDraws) -> Indices:
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
        boxes = self.boxes(height, width, draws.host)
        return erased(image_BCHW, boxes, fill=self.fill, draws=draws.host)


# --- Random changes of brightness, contrast, saturation and hue ---


class ColorJitter(PixelOperation):
    """Factors from 1 - x to 1 + x, and a turn of the hues by up to `hue` of the circle, as torchvision's ColorJitter.

    Always in this order; torchvision's is random. Saturation and hue leave grey images as they are.
    """

    def __init__(
        self, *, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0, hue: float = 0.0
    ) -> None:
        self.brightness, self.contrast, self.saturation, self.hue = brightness, contrast, saturation, hue
        check(self, brightness=Range(0), contrast=Range(0), saturation=Range(0), hue=Range(0, 0.5))

    def factors(self, draws: HostDraws) -> dict[str, NDArray[np.float32]]:
        """Of the changes that are made, in their order."""
        most = {"brightness": self.brightness, "contrast": self.contrast, "saturation": self.saturation}
        factors = {name: draws.uniform(max(0.0, 1 - by), 1 + by) for name, by in most.items()}
        factors["hue"] = draws.uniform(-self.hue, self.hue)
        return {name: factor_B for name, factor_B in factors.items() if getattr(self, name)}

    def change(self, image_BCHW: "Tensor", draws: Draws) -> "Tensor":
        from lockstep.augment.kernels import recolored

        factors = self.factors(draws.host)
        if not factors:
            return image_BCHW
        return recolored(image_BCHW, np.stack(list(factors.values()), 1), names=list(factors))
