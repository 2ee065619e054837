"""Mixup and cutmix: each sample with its partner, the neighbour in the global batch.

The order of an epoch is random, so partners are. Both are in the same micro-batch of the same process, if it has an even number of
samples, which config/batches.py asks for. Losses are mixed where they are computed, by `share` and `partner` of the batch
(training/metrics.py), so every task whose loss is per sample can train on mixed samples.
"""

# B batch · C channel · H W pixel

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lockstep.augment.operation import Operation, check, images_of
from lockstep.config.schema import number
from lockstep.data.dataset import Batch
from lockstep.data.images import spatial
from lockstep.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.augment.draws import Draws
    from lockstep.augment.kernels import Box

ALPHA = number(0, 0.2, above=True, high=100)
PROBABILITY = number(0, 1, high=1)
MASKS = "{} pastes masks, and mixup would mix losses of masks that are pasted already. Type one of augment=[mixup] and augment=[cutmix]."
CELLS = 4096  # of the table of a Beta distribution: its error is below 1e-6


@cache
def beta_table(alpha: float) -> NDArray[np.float64]:
    """Of a number from Beta(alpha, alpha) below 1/2, to the power of alpha: its quantiles at 0, 1/CELLS, ..., 1.

    The density of t = x^alpha is (1 - t^(1/alpha))^(alpha-1), which is smooth also where that of x is infinite.
    """
    t = np.linspace(0, 0.5**alpha, 64 * CELLS + 1)
    density = (1 - t ** (1 / alpha)) ** (alpha - 1)
    area = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return np.interp(np.linspace(0, 1, CELLS + 1), area / area[-1], t)


def beta(draws: "Draws", alpha: float) -> "Tensor":
    """number_B from Beta(alpha, alpha), as float32, by the inverse of its distribution."""
    import torch

    from lockstep.augment.draws import wide

    at_B = draws.uniform() * CELLS
    table = torch.from_numpy(beta_table(alpha)).float().to(at_B.device, non_blocking=True)
    cell_B = at_B.long().clamp(max=CELLS - 1)
    low_B, high_B = table[cell_B], table[cell_B + 1]
    x_B = (wide(low_B + (high_B - low_B) * (at_B - cell_B)) ** (1 / alpha)).float()
    return x_B.where(draws.chance(0.5), 1 - x_B)


class Mix(Operation):
    """Base class: what is taken from the partner."""

    mixes = True

    def mixed(self, batch: Batch, draws: "Draws", partner_B: "Tensor") -> tuple[Batch, "Tensor | None"]:
        """The batch, and share_B: the weight of the sample's own target; None if that was mixed as well."""
        raise NotImplementedError

    def __call__(self, batch: Batch, draws: "Draws") -> Batch:
        count = len(batch["index"])
        if count % (2 * draws.repeats):
            raise UserError(f"{draws.name} mixes pairs, and a batch has {count} samples. Give an even number.")
        partner_B = draws.partner_B
        batch, share_B = self.mixed(batch, draws, partner_B)
        if share_B is None:
            return batch
        if "share" in batch:  # mixed before, with the same partner
            share_B = share_B * batch["share"] + (1 - share_B) * (1 - batch["share"][partner_B])
        return {**batch, "share": share_B, "partner": partner_B}


class Mixup(Mix):
    """The weighted mean of a sample and its partner, with a weight from Beta(alpha, alpha) (Zhang et al. 2018).

    Takes images and other numbers, and no tokens. Each sample has a weight of its own.
    """

    def __init__(self, *, alpha: float = 0.2, probability: float = 1.0) -> None:
        self.alpha, self.probability = alpha, probability
        check(self, alpha=ALPHA, probability=PROBABILITY)

    def mixed(self, batch: Batch, draws: "Draws", partner_B: "Tensor") -> tuple[Batch, "Tensor"]:
        own = batch["input"] if "input" in batch else images_of(batch, draws.name)
        if not own.is_floating_point():
            images_of(batch, draws.name)
        share_B = beta(draws, self.alpha).where(draws.chance(self.probability), 1.0)
        share = share_B.view(-1, *[1] * (own.dim() - 1))
        result = own * share + own[partner_B] * (1 - share)
        result = result.to(own.dtype) if own.is_floating_point() else result.round().to(own.dtype)
        return {**batch, "input": result}, share_B


class Cutmix(Mix):
    """A box of the partner's image, whose share is from Beta(alpha, alpha) (Yun et al. 2019). Boxes as torchvision's CutMix.

    If the target is a mask, the box of the partner's mask is pasted with it.
    """

    def __init__(self, *, alpha: float = 1.0, probability: float = 1.0) -> None:
        self.alpha, self.probability = alpha, probability
        check(self, alpha=ALPHA, probability=PROBABILITY)

    def boxes(self, height: int, width: int, draws: "Draws") -> "Box":
        half_B = 0.5 * (1 - beta(draws, self.alpha)).sqrt()
        half_B = half_B.where(draws.chance(self.probability), 0.0)
        edges = []
        for side in (height, width):
            middle_B, reach_B = draws.below(side), (half_B * side).long()
            edges.append(((middle_B - reach_B).clamp(min=0), (middle_B + reach_B).clamp(max=side)))
        (top_B, bottom_B), (left_B, right_B) = edges
        return top_B, left_B, bottom_B - top_B, right_B - left_B

    def mixed(self, batch: Batch, draws: "Draws", partner_B: "Tensor") -> tuple[Batch, "Tensor | None"]:
        from lockstep.augment.kernels import inside

        height, width = images_of(batch, draws.name).shape[-2:]
        box = self.boxes(height, width, draws)
        inside_BHW = inside(box, height, width)
        moved = {"input": batch["input"], **spatial(batch)}
        for name, value in moved.items():
            if value.shape[-2:] != (height, width) or (name != "input" and "target" not in moved):
                raise UserError(
                    f"{draws.name} cannot paste a part of `{name}` of shape {tuple(value.shape)} with a part of the image. "
                    f"Leave it out: ~{draws.name}."
                )
        pasted = {
            name: value[partner_B].where(inside_BHW.view(-1, *[1] * (value.dim() - 3), height, width), value)
            for name, value in moved.items()
        }
        if "target" in moved:
            if "share" in batch:
                raise UserError(MASKS.format(draws.name))
            return {**batch, **pasted}, None
        return {**batch, **pasted}, 1 - (box[2] * box[3]).float() / (height * width)


class MixupOrCutmix(Mix):
    """Cutmix for a share of `switch` of the samples, mixup for the others, as timm's Mixup chooses by element."""

    def __init__(
        self, *, mixup_alpha: float = 0.8, cutmix_alpha: float = 1.0, switch: float = 0.5, probability: float = 1.0
    ) -> None:
        self.mixup_alpha, self.cutmix_alpha = mixup_alpha, cutmix_alpha
        self.switch, self.probability = switch, probability
        check(self, mixup_alpha=ALPHA, cutmix_alpha=ALPHA, switch=PROBABILITY, probability=PROBABILITY)
        self.mixup = Mixup(alpha=mixup_alpha, probability=probability)
        self.cutmix = Cutmix(alpha=cutmix_alpha, probability=probability)

    def mixed(self, batch: Batch, draws: "Draws", partner_B: "Tensor") -> tuple[Batch, "Tensor"]:
        mean, of_mean_B = self.mixup.mixed(batch, draws, partner_B)
        pasted, of_pasted_B = self.cutmix.mixed(batch, draws, partner_B)
        if of_pasted_B is None:
            raise UserError(MASKS.format(draws.name))
        cut_B = draws.chance(self.switch)
        chosen = pasted["input"].where(cut_B[:, None, None, None], mean["input"])
        return {**pasted, "input": chosen}, of_pasted_B.where(cut_B, of_mean_B)
