"""Random erasing."""

# B batch · C channel · H W pixel

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from lockstep.augment.geometry import ATTEMPTS
from lockstep.augment.operation import PixelOperation, check, check_rising
from lockstep.config.kinds import Kind, number, numbers

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.augment.boxes import Box
    from lockstep.augment.draws import Draws

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
        from lockstep.augment.boxes import first_that_fits, random_sides

        # torchvision's ratio is of height to width
        h_BT, w_BT = random_sides(draws, height * width, self.scale, self.ratio, ATTEMPTS)
        fits_BT = (h_BT < height) & (w_BT < width)
        erased_B = draws.chance(self.probability)
        h_B, w_B = (first_that_fits(fits_BT, side_BT, 0) * erased_B for side_BT in (h_BT, w_BT))
        return draws.below(height - h_B + 1), draws.below(width - w_B + 1), h_B, w_B

    def change(self, image_BCHW: "Tensor", draws: "Draws") -> "Tensor":
        from lockstep.augment.boxes import inside

        height, width = image_BCHW.shape[-2:]
        inside_BHW = inside(self.boxes(height, width, draws), height, width)
        fill = noise(image_BCHW, draws) if self.fill == "noise" else self.fill
        return image_BCHW.where(~inside_BHW[:, None], fill)


def noise(image_BCHW: "Tensor", draws: "Draws") -> "Tensor":
    """Random bytes: eight of each draw."""
    count = image_BCHW[0].numel()
    return draws.bits(-(-count // 8)).view(image_BCHW.dtype)[:, :count].reshape(image_BCHW.shape)
