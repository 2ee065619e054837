"""uint8 images to a network's input, in batches, on their device. Needs torch alone: an exported folder has a copy of this file."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

# B batch · C channel · H W pixel


class Preprocess:
    """Resizes (bilinear, with antialiasing) and normalises. Only bytes are copied to the device: a quarter of the size of floats."""

    def __init__(
        self, *, image_size: int, mean: Sequence[float], std: Sequence[float], channels_last: bool = False
    ) -> None:
        self.image_size = image_size
        # (x / 255 - mean) / std as one multiplication and one addition
        self.scale = torch.tensor([1 / (255 * s) for s in std]).view(-1, 1, 1)
        self.shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(-1, 1, 1)
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, image_BCHW: Tensor) -> Tensor:
        """uint8 in 0..255 of any size to float32 of `image_size`, normalised."""
        if self.scale.device != image_BCHW.device:
            self.scale, self.shift = self.scale.to(image_BCHW.device), self.shift.to(image_BCHW.device)
        x = image_BCHW
        if x.shape[-2:] != (self.image_size, self.image_size):
            x = F.interpolate(x.float(), size=(self.image_size, self.image_size), mode="bilinear", antialias=True)
        # Copy into a tensor of that format: `contiguous` does not change images of one channel, which have both formats, and
        # then the strides of the first weights would decide in which one a network computes.
        out = torch.empty_like(x, dtype=torch.float32, memory_format=self.memory_format)
        return torch.addcmul(self.shift, x, self.scale, out=out)


def resize_nearest(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """...HW of any type to `size` without mixing values, which F.interpolate lacks for integers other than bytes."""
    (h, w), (height, width) = masks.shape[-2:], size
    y_H, x_W = (2 * torch.arange(side, device=masks.device) + 1 for side in size)
    return masks[..., (y_H * h // (2 * height))[:, None], x_W * w // (2 * width)]
