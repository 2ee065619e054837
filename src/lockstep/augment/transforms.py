"""Operations for images: shift, flip, random resized crop, rotation, random erasing, jitter. Masks move with their images."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from lockstep.augment.operation import GeometricOperation, PixelOperation, check, check_rising
from lockstep.config.schema import Kind, number, numbers, whole

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.augment.draws import Draws
    from lockstep.augment.kernels import Box


# --- Operations that move pixels: shift, flip, random resized crop, rotation. Masks move with their images ---

# B batch · C channel · H W pixel


ATTEMPTS = 10  # at a box that fits into the image, as in torchvision
PROBABILITY = number(0, 0.5, high=1)
MASK_VALUE = whole(-(2**31), 255, high=2**31 - 1).or_null()
BYTE = whole(0, 0, high=255)


class Shift(GeometricOperation):
    """Shifts by up to `pixels` in each direction, padded with black: CIFAR-10's usual random crop (He et al. 2016)."""

    uncovers = True

    def __init__(self, *, pixels: int, mask_fill: int | None = None, image_size: int | None = None) -> None:
        self.pixels, self.mask_fill = pixels, mask_fill
        check(self, pixels=whole(1, 4, "a whole number of pixels"), mask_fill=MASK_VALUE)
        if image_size is not None and pixels >= image_size:
            raise ValueError(
                f"pixels={pixels} would move whole images of {image_size} pixels away. Type a number below {image_size}"
            )

    def plan(self, height: int, width: int, draws: "Draws") -> "Tensor":
        return draws.below(2 * self.pixels + 1, (2,)) - self.pixels

    def move(self, value_BCHW: "Tensor", plan: "Tensor", *, is_mask: bool) -> "Tensor":
        from lockstep.augment.kernels import shift

        down_B, right_B = plan.unbind(1)
        return shift(value_BCHW, down_B, right_B, self.pixels, fill=(self.mask_fill or 0) if is_mask else 0)


class Flip(GeometricOperation):
    """Mirrors images: left to right, and upside down, each with its probability."""

    def __init__(self, *, horizontal: float = 0.5, vertical: float = 0.0) -> None:
        self.horizontal, self.vertical = horizontal, vertical
        check(self, horizontal=PROBABILITY, vertical=PROBABILITY)

    def plan(self, height: int, width: int, draws: "Draws") -> dict[int, "Tensor"]:
        """Which samples are mirrored, by dimension."""
        mirrored = {-1: draws.chance(self.horizontal), -2: draws.chance(self.vertical)}
        return {dim: chosen for dim, chosen in mirrored.items() if (self.horizontal if dim == -1 else self.vertical)}

    def move(self, value_BCHW: "Tensor", plan: dict[int, "Tensor"], *, is_mask: bool) -> "Tensor":
        for dim, chosen_B in plan.items():
            value_BCHW = value_BCHW.flip(dim).where(chosen_B[:, None, None, None], value_BCHW)
        return value_BCHW


class RandomResizedCrop(GeometricOperation):
    """A box of a share of the image (`scale`) and an aspect ratio (`ratio`), resized to `image_size`: bilinear, with antialiasing.

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
        check(
            self,
            scale=numbers(number(0, 0.5, above=True, high=1), "[0.08,1]", 2),
            ratio=numbers(number(0, 1, above=True), "[0.75,1.33]", 2),
            image_size=whole(1, 224, "a whole number of pixels").or_null(),
        )
        check_rising(self, "scale", "ratio")

    def plan(self, height: int, width: int, draws: "Draws") -> "Box":
        from lockstep.augment.kernels import first_that_fits, random_sides

        low, high = self.ratio
        w_BT, h_BT = random_sides(draws, height * width, self.scale, self.ratio, ATTEMPTS)
        fits_BT = (w_BT > 0) & (w_BT <= width) & (h_BT > 0) & (h_BT <= height)
        # the largest box in the middle with a ratio that is allowed
        whole_w = round(height * high) if width / height > high else width
        whole_h = round(width / low) if width / height < low else height
        w_B, h_B = first_that_fits(fits_BT, w_BT, whole_w), first_that_fits(fits_BT, h_BT, whole_h)
        fits_B = fits_BT.any(1)
        top_B, left_B = (draws.below(room_B + 1).where(fits_B, room_B // 2) for room_B in (height - h_B, width - w_B))
        return top_B, left_B, h_B, w_B

    def move(self, value_BCHW: "Tensor", plan: "Box", *, is_mask: bool) -> "Tensor":
        from lockstep.augment.kernels import crop_nearest, crop_resized, to_bytes

        height, width = value_BCHW.shape[-2:]
        size = (height, width) if self.image_size is None else (self.image_size, self.image_size)
        return crop_nearest(value_BCHW, plan, size) if is_mask else to_bytes(crop_resized(value_BCHW, plan, size))


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
        check(self, degrees=number(0, 15, above=True, high=180), fill=BYTE, mask_fill=MASK_VALUE)

    def plan(self, height: int, width: int, draws: "Draws") -> "Tensor":
        from lockstep.augment.kernels import rotation

        return rotation(draws.uniform(-self.degrees, self.degrees) * (math.pi / 180))

    def move(self, value_BCHW: "Tensor", plan: Any, *, is_mask: bool) -> "Tensor":
        from lockstep.augment.kernels import affine_bilinear, affine_nearest, to_bytes

        if is_mask or self.interpolation == "nearest":
            return affine_nearest(value_BCHW, plan, (self.mask_fill or 0) if is_mask else self.fill)
        return to_bytes(affine_bilinear(value_BCHW, plan, self.fill))


# --- Random erasing ---

# B batch · C channel · H W pixel


FILL = Kind(lambda v: v == "noise" or (type(v) is int and 0 <= v <= 255), "noise, or a whole number of 0 to 255", "0")


class RandomErasing(PixelOperation):
    """Covers a box of a share of the image (`scale`) with noise or one value (Zhong et al. 2020). Masks stay as they are.

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
        check(
            self,
            probability=number(0, 0.25, high=1),
            scale=numbers(number(0, 0.3, high=1), "[0.02,0.33]", 2),
            ratio=numbers(number(0, 1, above=True), "[0.3,3.3]", 2),
            fill=FILL,
        )
        check_rising(self, "scale", "ratio")

    def boxes(self, height: int, width: int, draws: "Draws") -> "Box":
        """A box of 0 x 0 erases nothing."""
        from lockstep.augment.kernels import first_that_fits, random_sides

        # torchvision's ratio is of height to width
        h_BT, w_BT = random_sides(draws, height * width, self.scale, self.ratio, ATTEMPTS)
        fits_BT = (h_BT < height) & (w_BT < width)
        erased_B = draws.chance(self.probability)
        h_B, w_B = (first_that_fits(fits_BT, side_BT, 0) * erased_B for side_BT in (h_BT, w_BT))
        return draws.below(height - h_B + 1), draws.below(width - w_B + 1), h_B, w_B

    def change(self, image_BCHW: "Tensor", draws: "Draws") -> "Tensor":
        from lockstep.augment.kernels import inside

        height, width = image_BCHW.shape[-2:]
        inside_BHW = inside(self.boxes(height, width, draws), height, width)
        fill = noise(image_BCHW, draws) if self.fill == "noise" else self.fill
        return image_BCHW.where(~inside_BHW[:, None], fill)


def noise(image_BCHW: "Tensor", draws: "Draws") -> "Tensor":
    """Random bytes: eight of each draw."""
    count = image_BCHW[0].numel()
    return draws.bits(-(-count // 8)).view(image_BCHW.dtype)[:, :count].reshape(image_BCHW.shape)


# --- Random changes of brightness, contrast, saturation and hue ---

# B batch · C channel · H W pixel


class ColorJitter(PixelOperation):
    """Factors from 1 - x to 1 + x, and a turn of the hues by up to `hue` of the circle, as torchvision's ColorJitter.

    Always in this order; torchvision's is random. Saturation and hue leave grey images as they are.
    """

    def __init__(
        self, *, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0, hue: float = 0.0
    ) -> None:
        self.brightness, self.contrast, self.saturation, self.hue = brightness, contrast, saturation, hue
        strength = number(0, 0.4)
        check(self, brightness=strength, contrast=strength, saturation=strength, hue=number(0, 0.1, high=0.5))

    def change(self, image_BCHW: "Tensor", draws: "Draws") -> "Tensor":
        import torch

        from lockstep.augment import kernels

        image = image_BCHW.float()
        for name in ("brightness", "contrast", "saturation"):
            factor_B = draws.uniform(max(0.0, 1 - getattr(self, name)), 1 + getattr(self, name))
            image = getattr(kernels, name)(image, factor_B) if getattr(self, name) else image
        image = kernels.hue(image, draws.uniform(-self.hue, self.hue)) if self.hue else image
        return image.to(torch.uint8)
