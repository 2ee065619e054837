"""TrivialAugment and RandAugment: each image gets operations of its own choice, all in one pass over the batch.

Every operation has a neutral magnitude: a rotation by 0, a brightness of 1. So all images go through all of them, one affine
resampling, one table of 256 values for each channel and two blends, and the choice costs no branch.
"""

# B batch · C channel · H W pixel

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lockstep.augment.operation import GeometricOperation, check
from lockstep.augment.transforms import BYTE, MASK_VALUE
from lockstep.config.schema import whole
from lockstep.config.words import nearest
from lockstep.data.dataset import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.augment.draws import Draws

BINS = 31  # magnitudes of an operation
MOVING = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
BLENDS = ("brightness", "color", "contrast", "sharpness")
TABLES = ("posterize", "solarize", "autocontrast", "equalize", "invert")
KNOWN = ("identity", *MOVING, *BLENDS, *TABLES)


@dataclass(frozen=True)
class Space:
    """The greatest magnitudes: of a shear, a rotation in degrees, a translation in pixels by the image's side, a change of
    colours, and the bits that posterize takes away."""

    shear: float
    degrees: float
    pixels: Callable[[int], float]
    blend: float
    bits: int

    def magnitudes(self, name: str, side: int) -> list[float]:
        """Of an operation, by bin: signed ones without their sign; posterize: the bits that stay; solarize: the threshold."""
        import torch

        if name == "posterize":
            return (8 - (torch.arange(BINS) / ((BINS - 1) / self.bits))).round().tolist()
        if name == "solarize":
            return [255 * share for share in torch.linspace(1, 0, BINS).tolist()]
        kinds = {"shear": self.shear, "rotate": self.degrees, "translate": self.pixels(side)}
        most = kinds.get(name.partition("_")[0], self.blend)
        found: list[float] = torch.linspace(0, most, BINS).tolist()
        return [math.trunc(value) for value in found] if name.startswith("translate") else found


class Policy(GeometricOperation):
    """Base class. `operations`: the names to choose from."""

    space: ClassVar[Space]
    default: ClassVar[tuple[str, ...]] = KNOWN[:-1]  # as torchvision: without invert

    def __init__(
        self, *, operations: Sequence[str] | None, interpolation: str, fill: int, mask_fill: int | None
    ) -> None:
        self.operations = list(self.default if operations is None else operations)
        self.interpolation, self.fill, self.mask_fill = interpolation, fill, mask_fill
        self.uncovers = bool({*self.operations} & {*MOVING})
        check(self, fill=BYTE, mask_fill=MASK_VALUE)
        for name in self.operations:
            if name not in KNOWN:
                raise ValueError(
                    f"operations has {name}{nearest(name, list(KNOWN))}; it takes some of {', '.join(KNOWN)}"
                )
        if not self.operations:
            raise ValueError("operations=[] leaves nothing to choose from")

    def magnitudes(self, draws: "Draws", height: int, width: int) -> dict[str, "Tensor"]:
        """magnitude_B of each operation: neutral in all samples but those that have chosen it."""
        import torch

        sides = {"translate_x": width, "translate_y": height}
        table = torch.tensor([self.space.magnitudes(name, sides.get(name, 0)) for name in self.operations])
        chosen_B = draws.below(len(self.operations))
        sign_B = 1.0 - 2.0 * draws.below(2)
        magnitude_B = table.to(chosen_B.device, non_blocking=True)[chosen_B, self.bin_B(draws)]
        names = enumerate(self.operations)
        return {name: of_operation(name, magnitude_B, sign_B, chosen_B == place) for place, name in names}

    def bin_B(self, draws: "Draws") -> "Tensor":
        """The magnitude of each sample's operation, of 0 to 30."""
        raise NotImplementedError

    def plan(self, height: int, width: int, draws: "Draws") -> Any:
        from lockstep.augment.kernels import matrix

        found = self.magnitudes(draws, height, width)
        return matrix(found, height, width) if self.uncovers else None, found

    def move(self, value_BCHW: "Tensor", plan: Any, *, is_mask: bool) -> "Tensor":
        from lockstep.augment.kernels import affine_bilinear, affine_nearest, recolored, to_bytes

        matrix_B23, found = plan
        if is_mask:
            return value_BCHW if matrix_B23 is None else affine_nearest(value_BCHW, matrix_B23, self.mask_fill or 0)
        if matrix_B23 is not None and self.interpolation == "bilinear":
            value_BCHW = to_bytes(affine_bilinear(value_BCHW, matrix_B23, self.fill))
        elif matrix_B23 is not None:
            value_BCHW = affine_nearest(value_BCHW, matrix_B23, self.fill)
        return recolored(value_BCHW, found)


def of_operation(name: str, magnitude_B: "Tensor", sign_B: "Tensor", chosen_B: "Tensor") -> "Tensor":
    """Neutral where it is not chosen: no movement, a factor of 1, all bits, a threshold above all values; or False."""
    if name == "posterize":
        return magnitude_B.where(chosen_B, 8.0)
    if name == "solarize":
        return magnitude_B.where(chosen_B, 256.0)
    if name in MOVING or name in BLENDS:
        signed_B = (magnitude_B * sign_B).where(chosen_B, 0.0)
        return signed_B if name in MOVING else 1 + signed_B
    return chosen_B


class TrivialAugment(Policy):
    """One operation at a random magnitude (Müller, Hutter 2021): torchvision's TrivialAugmentWide."""

    space = Space(shear=0.99, degrees=135.0, pixels=lambda _: 32.0, blend=0.99, bits=6)

    def __init__(
        self,
        *,
        operations: Sequence[str] | None = None,
        interpolation: Literal["nearest", "bilinear"] = "nearest",
        fill: int = 0,
        mask_fill: int | None = None,
    ) -> None:
        super().__init__(operations=operations, interpolation=interpolation, fill=fill, mask_fill=mask_fill)

    def bin_B(self, draws: "Draws") -> "Tensor":
        return draws.below(BINS)


class RandAugment(Policy):
    """`count` operations one after another at one magnitude of 0 to 30 (Cubuk et al. 2020): torchvision's RandAugment."""

    space = Space(shear=0.3, degrees=30.0, pixels=lambda side: 150 / 331 * side, blend=0.9, bits=4)

    def __init__(
        self,
        *,
        count: int = 2,
        magnitude: int = 9,
        operations: Sequence[str] | None = None,
        interpolation: Literal["nearest", "bilinear"] = "nearest",
        fill: int = 0,
        mask_fill: int | None = None,
    ) -> None:
        self.count, self.magnitude = count, magnitude
        super().__init__(operations=operations, interpolation=interpolation, fill=fill, mask_fill=mask_fill)
        check(self, count=whole(1, 2), magnitude=whole(0, 9, high=BINS - 1))

    def bin_B(self, draws: "Draws") -> "Tensor":
        return (draws.place_B * 0) + self.magnitude

    def __call__(self, batch: Batch, draws: "Draws") -> Batch:
        for _ in range(self.count):
            batch = super().__call__(batch, draws)
        return batch
