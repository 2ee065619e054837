"""TrivialAugment and RandAugment: each image gets operations of its own choice. Images with the same operation are computed together."""

# B batch · C channel · H W pixel

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lockstep.augment.operation import (
    BYTE,
    MASK_VALUE,
    Draws,
    GeometricOperation,
    HostDraws,
    Range,
    check,
)
from lockstep.augment.transforms import affine_matrix
from lockstep.data.dataset import Batch, Indices

if TYPE_CHECKING:
    from torch import Tensor

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


class Policy(GeometricOperation):
    """Base class. `operations`: the names to choose from; by default all but invert, as torchvision."""

    space: ClassVar[Space]

    def __init__(
        self,
        *,
        operations: Sequence[Name] | None = None,
        interpolation: Literal["nearest", "bilinear"] = "nearest",
        fill: int = 0,
        mask_fill: int | None = None,
    ) -> None:
        self.operations: list[str] = list(NAMES[:-1] if operations is None else operations)
        self.interpolation, self.fill, self.mask_fill = interpolation, fill, mask_fill
        self.uncovers = bool({*self.operations} & {*MOVING})
        check(self, fill=BYTE, mask_fill=MASK_VALUE)
        if not self.operations or not {*self.operations} <= {*NAMES}:
            raise ValueError(f"operations={self.operations} is invalid; expected some of {', '.join(NAMES)}")

    def magnitudes(self, draws: HostDraws, height: int, width: int) -> tuple[NDArray[np.str_], NDArray[np.float64]]:
        """name_B of the operation that each sample has chosen, and magnitude_B: signed, or a factor for changes of colour."""
        table = np.stack([self.space.magnitudes(name, height, width) for name in self.operations])
        chosen_B = draws.below(len(self.operations))
        sign_B = 1 - 2 * draws.below(2)
        name_B, magnitude_B = np.array(self.operations)[chosen_B], table[chosen_B, self.bin_B(draws)]
        is_blend_B = np.isin(name_B, BLENDS)
        signed_B = is_blend_B + np.where(is_blend_B | np.isin(name_B, MOVING), sign_B, 1) * magnitude_B
        return name_B, signed_B

    def bin_B(self, draws: HostDraws) -> Indices:
        """The magnitude of each sample's operation, of 0 to 30."""
        raise NotImplementedError

    def plan(self, height: int, width: int, draws: Draws) -> Any:
        name_B, magnitude_B = self.magnitudes(draws.host, height, width)
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

    def bin_B(self, draws: HostDraws) -> Indices:
        return draws.below(BINS)


class RandAugment(Policy):
    """`count` operations one after another at one magnitude of 0 to 30 (Cubuk et al. 2020): torchvision's RandAugment."""

    space = Space(shear=0.3, degrees=30.0, pixels=lambda side: 150 / 331 * side, blend=0.9, bits=4)

    def __init__(
        self,
        *,
        count: int = 2,
        magnitude: int = 9,
        operations: Sequence[Name] | None = None,
        interpolation: Literal["nearest", "bilinear"] = "nearest",
        fill: int = 0,
        mask_fill: int | None = None,
    ) -> None:
        super().__init__(operations=operations, interpolation=interpolation, fill=fill, mask_fill=mask_fill)
        self.count, self.magnitude = count, magnitude
        check(self, count=Range(1, whole=True), magnitude=Range(0, BINS - 1, whole=True))

    def bin_B(self, draws: HostDraws) -> Indices:
        return np.full(len(draws.place_B), self.magnitude)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        for _ in range(self.count):
            batch = super().__call__(batch, draws)
        return batch
