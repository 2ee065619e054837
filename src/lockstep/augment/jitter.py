"""Random changes of brightness, contrast, saturation and hue."""

# B batch · C channel · H W pixel

from typing import TYPE_CHECKING

from lockstep.augment.operation import PixelOperation, check
from lockstep.config.kinds import number

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.augment.draws import Draws


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

        from lockstep.augment import pixels

        image = image_BCHW.float()
        for name in ("brightness", "contrast", "saturation"):
            factor_B = draws.uniform(max(0.0, 1 - getattr(self, name)), 1 + getattr(self, name))
            image = getattr(pixels, name)(image, factor_B) if getattr(self, name) else image
        image = pixels.hue(image, draws.uniform(-self.hue, self.hue)) if self.hue else image
        return image.to(torch.uint8)
