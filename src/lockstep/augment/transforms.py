"""Operations for images: shift, flip, random resized crop, rotation, random erasing, jitter, TrivialAugment and RandAugment.

Masks move with their images.
"""

# B batch · C channel · H W pixel · T attempt

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lockstep.augment.operation import (
    PAIR,
    Amount,
    Byte,
    Checked,
    Count,
    Draws,
    Fraction,
    GeometricOperation,
    MaskValue,
    PixelOperation,
    Positive,
    Probability,
)
from lockstep.data.dataset import Batch, Indices

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


@dataclass(kw_only=True, eq=False)
class RandomResizedCrop(Checked, GeometricOperation):
    """A box of a fraction of the image (`scale`) and an aspect ratio (`ratio`), resized to `image_size`: bilinear, with antialiasing.

    Chooses boxes as torchvision's RandomResizedCrop does (Szegedy et al. 2015). Without `image_size`, images keep their size.
    """

    scale: Annotated[Sequence[Fraction], *PAIR] = (0.08, 1.0)
    ratio: Annotated[Sequence[Positive], *PAIR] = (3 / 4, 4 / 3)
    image_size: Count | None = None

    def plan(self, height: int, width: int, draws: Draws) -> Indices:
        """box_B4: top, left, height, width."""
        low, high = self.ratio
        w_BT, h_BT = random_sides(draws, height * width, self.scale, self.ratio)
        fits_BT = (w_BT > 0) & (w_BT <= width) & (h_BT > 0) & (h_BT <= height)
        # if none fits, the largest box in the middle with a ratio that is allowed
        whole_w = round(height * high) if width / height > high else width
        whole_h = round(width / low) if width / height < low else height
        w_B, h_B = first_that_fits(fits_BT, w_BT, whole_w), first_that_fits(fits_BT, h_BT, whole_h)
        rooms, fits_B = (height - h_B, width - w_B), fits_BT.any(1)
        top_B, left_B = (np.where(fits_B, draws.below(room_B + 1), room_B // 2) for room_B in rooms)
        return np.stack([top_B, left_B, h_B, w_B], 1)

    def move(self, value_BCHW: "Tensor", plan: Indices, *, is_mask: bool) -> "Tensor":
        from lockstep.augment.kernels import cropped

        height, width = value_BCHW.shape[-2:]
        return cropped(value_BCHW, plan, size=(self.image_size or height, self.image_size or width), is_mask=is_mask)


@dataclass(kw_only=True, eq=False)
class Rotate(Checked, GeometricOperation):
    """Rotates about the centre by up to `degrees` in either direction; uncovered pixels become `fill`."""

    uncovers = True
    degrees: Annotated[float, Field(gt=0, le=180)]
    interpolation: Literal["bilinear", "nearest"] = "bilinear"
    fill: Byte = 0
    mask_fill: MaskValue = None

    def plan(self, height: int, width: int, draws: Draws) -> NDArray[np.float32]:
        return affine_matrix({"rotate": draws.uniform(-self.degrees, self.degrees)}, height, width)

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


# --- Random changes of brightness, contrast, saturation and hue ---


@dataclass(kw_only=True, eq=False)
class ColorJitter(Checked, PixelOperation):
    """Factors from 1 - x to 1 + x, and a turn of the hues by up to `hue` of the circle, as torchvision's ColorJitter.

    Always in this order; torchvision's is random. Saturation and hue leave grey images as they are.
    """

    brightness: Amount = 0.0
    contrast: Amount = 0.0
    saturation: Amount = 0.0
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0

    def factors(self, draws: Draws) -> dict[str, NDArray[np.float32]]:
        """Of the changes that are made, in their order."""
        most = {"brightness": self.brightness, "contrast": self.contrast, "saturation": self.saturation}
        factors = {name: draws.uniform(max(0.0, 1 - by), 1 + by) for name, by in most.items()}
        factors["hue"] = draws.uniform(-self.hue, self.hue)
        return {name: factor_B for name, factor_B in factors.items() if getattr(self, name)}

    def change(self, image_BCHW: "Tensor", draws: Draws) -> "Tensor":
        from lockstep.augment.kernels import recolored

        factors = self.factors(draws)
        if not factors:
            return image_BCHW
        return recolored(image_BCHW, np.stack(list(factors.values()), 1), names=list(factors))


# --- Policies: each image gets operations of its own choice, and images with the same operation are computed together ---

Name = Literal[
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color", "contrast", "sharpness",
    "posterize", "solarize", "autocontrast", "equalize", "invert",
]  # fmt: skip
NAMES: tuple[str, ...] = get_args(Name)
MOVING, BLENDS = NAMES[1:6], NAMES[6:10]
BINS = 31  # magnitudes of an operation


@dataclass(frozen=True)
class Space:
    """The greatest magnitudes: of a shear, a rotation in degrees, a translation in pixels by the image's side, a change of
    colours, and the bits that posterize takes away."""

    shear: float
    degrees: float
    pixels: Callable[[int], float]
    blend: float
    bits: int

    @cache  # noqa: B019  # of two spaces, which live as long as the process
    def magnitudes(self, name: str, height: int, width: int) -> NDArray[np.float64]:
        """Of an operation, by bin: signed ones without their sign; posterize: the bits that stay; solarize: the threshold."""
        steps = np.arange(BINS) / (BINS - 1)
        if name == "posterize":
            return (8 - self.bits * steps).round()
        if name == "solarize":
            return 255 * (1 - steps)
        if name.startswith("translate"):
            return np.trunc(np.float32(self.pixels(width if name[-1] == "x" else height)) * np.float32(steps))
        most = {"shear_x": self.shear, "shear_y": self.shear, "rotate": self.degrees}
        return most.get(name, self.blend) * steps


@dataclass(kw_only=True, eq=False)
class Policy(Checked, GeometricOperation):
    """Base class. `operations`: the names to choose from; by default all but invert, as torchvision."""

    space: ClassVar[Space]
    operations: Annotated[Sequence[Name], Field(min_length=1)] | None = None
    interpolation: Literal["nearest", "bilinear"] = "nearest"
    fill: Byte = 0
    mask_fill: MaskValue = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.names: list[str] = list(NAMES[:-1] if self.operations is None else self.operations)
        self.uncovers = bool({*self.names} & {*MOVING})

    def magnitudes(self, draws: Draws, height: int, width: int) -> tuple[NDArray[np.str_], NDArray[np.float64]]:
        """name_B of the operation that each sample has chosen, and magnitude_B: signed, or a factor for changes of colour."""
        table = np.stack([self.space.magnitudes(name, height, width) for name in self.names])
        chosen_B = draws.below(len(self.names))
        sign_B = 1 - 2 * draws.below(2)
        name_B, magnitude_B = np.array(self.names)[chosen_B], table[chosen_B, self.bin_B(draws)]
        is_blend_B = np.isin(name_B, BLENDS)
        signed_B = is_blend_B + np.where(is_blend_B | np.isin(name_B, MOVING), sign_B, 1) * magnitude_B
        return name_B, signed_B

    def bin_B(self, draws: Draws) -> Indices:
        """The magnitude of each sample's operation, of 0 to 30."""
        raise NotImplementedError

    def plan(self, height: int, width: int, draws: Draws) -> Any:
        name_B, magnitude_B = self.magnitudes(draws, height, width)
        matrix_B23 = affine_matrix({name: magnitude_B * (name_B == name) for name in MOVING}, height, width)
        return np.where(np.isin(name_B, MOVING), "move", name_B), np.float32(magnitude_B), matrix_B23

    def move(self, value_BCHW: "Tensor", plan: Any, *, is_mask: bool) -> "Tensor":
        from lockstep.augment.kernels import each_by_its_own, transformed

        if is_mask:
            fill = self.mask_fill or 0
            return transformed(value_BCHW, plan[2], interpolation="nearest", fill=fill) if self.uncovers else value_BCHW
        return each_by_its_own(value_BCHW, *plan, interpolation=self.interpolation, fill=self.fill)


class TrivialAugment(Policy):
    """One operation at a random magnitude (Müller, Hutter 2021): torchvision's TrivialAugmentWide."""

    space = Space(shear=0.99, degrees=135.0, pixels=lambda _: 32.0, blend=0.99, bits=6)

    def bin_B(self, draws: Draws) -> Indices:
        return draws.below(BINS)


@dataclass(kw_only=True, eq=False)
class RandAugment(Policy):
    """`count` operations one after another at one magnitude of 0 to 30 (Cubuk et al. 2020): torchvision's RandAugment."""

    space = Space(shear=0.3, degrees=30.0, pixels=lambda side: 150 / 331 * side, blend=0.9, bits=4)

    count: Count = 2
    magnitude: Annotated[int, Field(ge=0, lt=BINS)] = 9

    def bin_B(self, draws: Draws) -> Indices:
        return np.full(len(draws.place_B), self.magnitude)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        for _ in range(self.count):
            batch = super().__call__(batch, draws)
        return batch
