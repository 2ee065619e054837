"""Mixup and cutmix: each sample is mixed with its partner, the neighbour in the global batch.

The order of an epoch is random, so partners are random too. Both are in the same micro-batch of the same process, if it
has an even number of samples, which config/settings.py requires. Losses are mixed where they are computed, with `share`
and `partner` of the batch (training/losses.py), so every task with a loss per sample can train on mixed samples.
"""

# B batch · C channel · H W pixel

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lockstep.augment.operation import Checked, Draws, Operation, Probability, images_of
from lockstep.data.dataset import Batch, Indices
from lockstep.data.places import spatial
from lockstep.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

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
        values = {"input": batch["input"], **spatial(batch, nested=True)}
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
