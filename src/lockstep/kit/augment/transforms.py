"""Operations for batches of images: shift, flip, random erasing, mixup, cutmix. Masks move with their images.

Mixup and cutmix mix each sample with its partner, the neighbour in the global batch. The order of an epoch is random,
so partners are random too. Both are in the same micro-batch of the same process, if it has an even number of samples,
which config/settings.py requires. Losses are mixed where they are computed, with `share` and `partner` of the batch
(training/losses.py), so every task with a loss per sample can train on mixed samples.
"""

# B batch · C channel · H W pixel · T attempt

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lockstep import Batch, Indices, UserError
from lockstep.kit.augment.operation import (
    PAIR,
    Byte,
    Checked,
    Count,
    Draws,
    GeometricOperation,
    MaskValue,
    Operation,
    PixelOperation,
    Positive,
    Probability,
    images_of,
    to_device,
)
from lockstep.kit.images import spatial

if TYPE_CHECKING:
    from torch import Tensor

# --- Operations that move pixels ---


@dataclass(kw_only=True, eq=False)
class Shift(Checked, GeometricOperation):
    """Shifts by up to `pixels` in each direction, padded with black: CIFAR-10's usual random crop (He et al. 2016)."""

    uncovers = True
    pixels: Count
    mask_fill: MaskValue = None

    def plan(self, height: int, width: int, draws: Draws) -> Indices:
        """The upper left corner of the result in the padded image. The shift is `pixels` minus this corner."""
        if self.pixels >= min(height, width):
            raise UserError(
                f"{draws.name}.pixels={self.pixels} shifts images of {height} x {width} pixels out of view. Set fewer."
            )
        return 2 * self.pixels - draws.below(2 * self.pixels + 1, (2,))

    def move(self, value_BCHW: "Tensor", plan: Indices, *, is_mask: bool) -> "Tensor":
        import torch

        padded = torch.nn.functional.pad(value_BCHW, [self.pixels] * 4, value=(is_mask and self.mask_fill) or 0)
        (h, w), corner_B2 = value_BCHW.shape[-2:], to_device(padded.device, plan)
        every_B = torch.arange(len(corner_B2), device=padded.device)
        return padded.unfold(2, h, 1).unfold(3, w, 1)[every_B, :, corner_B2[:, 0], corner_B2[:, 1]]


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
            rows = to_device(value_BCHW.device, np.flatnonzero(mirrored_B))
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
        h_B, w_B = sides_2BT[:, draws.row_B, first_B] * erased_B
        return np.stack([draws.below(height - h_B + 1), draws.below(width - w_B + 1), h_B, w_B], 1)

    def change(self, image_BCHW: "Tensor", draws: Draws) -> "Tensor":
        result, (h, w) = image_BCHW.clone(), image_BCHW.shape[-2:]
        for index, (top, left, height, width) in enumerate(self.boxes(h, w, draws).tolist()):
            if height:
                box, fill = result[index, :, top : top + height, left : left + width], self.fill
                box[:] = draws.tensor(draws.noise(index, box.numel())).view(box.shape) if fill == "noise" else fill
        return result


# --- Mixed samples ---

Share = NDArray[np.float32]
Alpha = Annotated[float, Field(gt=0, le=100)]
MASKS = "{} pastes masks, but mixup cannot mix the losses of pasted masks. Use augment=[mixup] or augment=[cutmix]."
CELLS = 4096  # of the table of a Beta distribution, whose error is below 1e-6


@cache
def beta_table(alpha: float) -> NDArray[np.float64]:
    """Quantiles at 0, 1/CELLS, ..., 1 of x^alpha, where x is from Beta(alpha, alpha) and below 1/2.

    The density of t = x^alpha is (1 - t^(1/alpha))^(alpha-1), which is smooth even where the density of x is infinite.
    """
    t = np.linspace(0, 0.5**alpha, 64 * CELLS + 1)
    density = (1 - t ** (1 / alpha)) ** (alpha - 1)
    area = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return np.interp(np.linspace(0, 1, CELLS + 1), area / area[-1], t)


def beta(draws: Draws, alpha: float) -> Share:
    """share_B from Beta(alpha, alpha), by inverse transform sampling."""
    x_B = np.interp(draws.uniform() * CELLS, np.arange(CELLS + 1), beta_table(alpha)) ** (1 / alpha)
    return np.where(draws.chance(0.5), x_B, 1 - x_B).astype(np.float32)


class Mix(Operation):
    """Base class; subclasses define what is taken from the partner."""

    mixes = True

    def mixed(self, batch: Batch, draws: Draws, partner_B: "Tensor") -> tuple[Batch, Share | None]:
        """The batch, and share_B: the weight of the sample's own target; None if the target is mixed as well."""
        raise NotImplementedError

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        count = len(batch["index"])
        if count % (2 * draws.repeats):
            raise UserError(f"{draws.name} mixes pairs, but a batch has {count} samples. Use an even number.")
        partner_B = draws.partner_B
        batch, target_share_B = self.mixed(batch, draws, partner_B)
        if target_share_B is None:
            return batch
        share_B = draws.tensor(target_share_B)
        if "share" in batch:  # already mixed, with the same partner
            share_B = share_B * batch["share"] + (1 - share_B) * (1 - batch["share"][partner_B])
        return {**batch, "share": share_B, "partner": partner_B}


@dataclass(kw_only=True, eq=False)
class Mixup(Checked, Mix):
    """The weighted mean of a sample and its partner, with a weight from Beta(alpha, alpha) (Zhang et al. 2018).

    Accepts images and other numbers, not tokens. Each sample has its own weight.
    """

    alpha: Alpha = 0.2
    probability: Probability = 1.0

    def mixed(self, batch: Batch, draws: Draws, partner_B: "Tensor") -> tuple[Batch, Share]:
        value = batch.get("input")
        if value is None or not value.is_floating_point():
            value = images_of(batch, draws.name)
        share_B = beta(draws, self.alpha)
        share_B[~draws.chance(self.probability)] = 1
        share = draws.tensor(share_B).view(-1, *[1] * (value.dim() - 1))
        mean = (value * share).add_(value.index_select(0, partner_B) * (1 - share))
        return {**batch, "input": (mean if value.is_floating_point() else mean.round_()).to(value.dtype)}, share_B


@dataclass(kw_only=True, eq=False)
class Cutmix(Checked, Mix):
    """A box of the partner's image, whose fraction of the image is from Beta(alpha, alpha) (Yun et al. 2019).

    Boxes are placed as by torchvision's CutMix. If the target is a mask, the box of the partner's mask is pasted with
    it.
    """

    alpha: Alpha = 1.0
    probability: Probability = 1.0

    def boxes(self, height: int, width: int, draws: Draws) -> Indices:
        """box_B4: top, left, height, width."""
        half_B = 0.5 * np.sqrt(1 - beta(draws, self.alpha)) * draws.chance(self.probability)
        edges = []
        for side in (height, width):
            middle_B, reach_B = draws.below(side), (half_B * side).astype(np.int64)
            edges.append((np.maximum(middle_B - reach_B, 0), np.minimum(middle_B + reach_B, side)))
        (top_B, bottom_B), (left_B, right_B) = edges
        return np.stack([top_B, left_B, bottom_B - top_B, right_B - left_B], 1)

    def mixed(self, batch: Batch, draws: Draws, partner_B: "Tensor") -> tuple[Batch, Share | None]:
        height, width = images_of(batch, draws.name).shape[-2:]
        values = {"input": batch["input"], **spatial(batch)}
        for name, value in values.items():
            if getattr(value, "shape", ())[-2:] != (height, width) or (name != "input" and "target" not in values):
                raise UserError(
                    f"{draws.name} cannot paste a part of `{name}` with a part of the image. Remove it: ~{draws.name}."
                )
        box_B4 = self.boxes(height, width, draws)
        top_B1, left_B1, height_B1, width_B1 = box_B4[:, :, None].swapaxes(0, 1)
        rows_BH = (np.arange(height) >= top_B1) & (np.arange(height) < top_B1 + height_B1)
        columns_BW = (np.arange(width) >= left_B1) & (np.arange(width) < left_B1 + width_B1)
        inside_BHW = draws.tensor(rows_BH)[:, :, None] & draws.tensor(columns_BW)[:, None, :]

        def pasted(value: "Tensor") -> "Tensor":
            inside = inside_BHW.view(-1, *[1] * (value.dim() - 3), height, width)
            return value.index_select(0, partner_B).where(inside, value)

        result = {**batch, **{name: pasted(value) for name, value in values.items()}}
        if "target" not in values:
            return result, (1 - box_B4[:, 2] * box_B4[:, 3] / (height * width)).astype(np.float32)
        if "share" in batch:
            raise UserError(MASKS.format(draws.name))
        return result, None


@dataclass(kw_only=True, eq=False)
class MixupOrCutmix(Checked, Mix):
    """Cutmix with the probability `switch`, mixup for the other samples, as timm's Mixup chooses by element."""

    mixup_alpha: Alpha = 0.8
    cutmix_alpha: Alpha = 1.0
    switch: Probability = 0.5
    probability: Probability = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mixup = Mixup(alpha=self.mixup_alpha, probability=self.probability)
        self.cutmix = Cutmix(alpha=self.cutmix_alpha, probability=self.probability)

    def mixed(self, batch: Batch, draws: Draws, partner_B: "Tensor") -> tuple[Batch, Share]:
        mean, mixup_share_B = self.mixup.mixed(batch, draws, partner_B)
        pasted, cutmix_share_B = self.cutmix.mixed(batch, draws, partner_B)
        if cutmix_share_B is None:
            raise UserError(MASKS.format(draws.name))
        cut_B = draws.chance(self.switch)
        chosen = pasted["input"].where(draws.tensor(cut_B)[:, None, None, None], mean["input"])
        return {**pasted, "input": chosen}, np.where(cut_B, cutmix_share_B, mixup_share_B)
