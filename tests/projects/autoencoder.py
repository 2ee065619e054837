"""A masked autoencoder: fills in the patches of a picture that it does not see."""

# B batch · C channel · H W pixel · P patch · S pixel of a patch
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from lockstep import Arrays
from lockstep.kit import Images
from lockstep.kit.panels import Content, Gallery, Kept, Panel, Sample
from lockstep.kit.task import Task

SIDE = 4


class Bars(Images):
    mean, std = (0.3,), (0.3,)

    def __init__(self, *, count: int = 80, **images: Any) -> None:
        super().__init__(**images)
        random, test = np.random.default_rng(0), count // 5
        pixels = random.integers(0, 60, (count, 1, self.image_size, self.image_size), dtype=np.uint8)
        for image in pixels:
            place = random.integers(self.image_size - 3)
            image[0, place : place + 3] += 150
        self.train, self.test = Arrays(input=pixels[test:]), Arrays(input=pixels[:test])


class Autoencoder(nn.Module):
    """image_BCHW to what it makes of all patches, and which it did not see."""

    def __init__(self, *, image_size: int, hidden: float = 0.5, width: int = 32) -> None:
        super().__init__()
        self.hidden, patches = hidden, (image_size // SIDE) ** 2
        self.nothing = nn.Parameter(torch.zeros(SIDE**2))
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(image_size**2, width), nn.GELU(), nn.Linear(width, image_size**2)
        )
        self.shape = (patches, SIDE**2)

    def forward(self, image_BCHW: Tensor) -> dict[str, Tensor]:
        patch_BPS = F.unfold(image_BCHW, SIDE, stride=SIDE).transpose(1, 2)
        hidden_BP = lockstep.rand(patch_BPS, self.shape[0]) < self.hidden
        seen_BPS = torch.where(hidden_BP[:, :, None], self.nothing, patch_BPS)
        return {"patches": self.layers(seen_BPS).unflatten(1, self.shape), "hidden": hidden_BP}


class Reconstructions(Kept):
    """A random sample of pictures: the original, what was seen, what was made of it."""

    def __init__(self, size: int) -> None:
        super().__init__(8, 1, size, 3 * size)

    def value(self, output: Any, batch: Mapping[str, Any], loss_B: Tensor) -> Tensor:
        image_BCHW, hidden_BP1 = batch["input"], output["hidden"][:, :, None]
        original_BPS = F.unfold(image_BCHW, SIDE, stride=SIDE).transpose(1, 2)
        made_BPS = torch.where(hidden_BP1, output["patches"], original_BPS)
        parts = (original_BPS, original_BPS.masked_fill(hidden_BP1, -1.0), made_BPS)
        return torch.cat([F.fold(x.transpose(1, 2), image_BCHW.shape[2:], SIDE, stride=SIDE) for x in parts], 3)

    def contents(self) -> Sequence[Content]:
        pictures = [(i, ((x * 0.3 + 0.3) * 255).clamp(0, 255).byte().cpu().numpy()) for i, x in self.found()]
        return [Gallery("Reconstructions", [Sample(i, {}, image_CHW) for i, image_CHW in pictures])]


class Reconstruct(Task):
    def loss(self, output: dict[str, Tensor], batch: Mapping[str, Any]) -> Tensor:
        """loss_B: the error of the hidden pixels"""
        patch_BPS, hidden_BP = F.unfold(batch["input"], SIDE, stride=SIDE).transpose(1, 2), output["hidden"]
        error_BP = (output["patches"] - patch_BPS).square().mean(2)
        return (error_BP * hidden_BP).sum(1) / hidden_BP.sum(1).clamp(min=1)

    def test_panels(self) -> dict[str, Panel]:
        return {"reconstructions": Reconstructions(16)}
