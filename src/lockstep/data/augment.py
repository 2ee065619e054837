"""Random shifts and mirror images, decided by (seed, epoch, sample): no generator, nothing to store, the same in every world."""

# B batch · C channel · H W pixel

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.data.sampler import keys


def signed(value: int) -> int:
    """The int64 with the same bits as a uint64, because torch has no uint64 arithmetic."""
    return value - 2**64 if value >= 2**63 else value


def shifted_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift: zeros come in from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """sampler.mix on the device: SplitMix64's finalizer on the bits of int64."""
    x = (x ^ shifted_right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted_right(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shifted_right(x, 31)


def random_bits(index_B: Tensor, seed: int, epoch: int) -> Tensor:
    """64 random bits for each sample of an epoch, as int64. The epoch's order uses other keys of the same family."""
    key = int(keys(seed, epoch).view(np.int64)[0])
    return mix(index_B * signed(0x9E3779B97F4A7C15) + key)


class Augment:
    """Shifts by up to `shift` pixels in each direction, padded with black; mirrors half of the images if `flip`.

    The same as CIFAR-10's usual random crop with padding and horizontal flip (He et al. 2016), for a whole batch of bytes
    at once on its device.
    """

    def __init__(self, *, shift: int, flip: bool) -> None:
        self.shift, self.flip = shift, flip

    def __call__(self, images: Tensor, index_B: Tensor, seed: int, epoch: int) -> Tensor:
        """Of BCHW, or of masks as BHW."""
        bits_B, s = random_bits(index_B, seed, epoch), self.shift
        b, *_, h, w = images.shape
        image_BCHW = images.reshape(b, -1, h, w)
        c = image_BCHW.shape[1]
        down_B, right_B = (shifted_right(bits_B, 16 * i) & 0xFFFF for i in range(2))
        mirrored_B = ((bits_B >> 32) & 1).bool() if self.flip else torch.zeros_like(bits_B, dtype=torch.bool)
        y_H, x_W = torch.arange(h, device=image_BCHW.device), torch.arange(w, device=image_BCHW.device)
        y_BH = (down_B % (2 * s + 1))[:, None] + y_H
        x_BW = (right_B % (2 * s + 1))[:, None] + torch.where(mirrored_B[:, None], w - 1 - x_W, x_W)
        padded_BCHW = F.pad(image_BCHW, (s, s, s, s))
        rows_BCHW = padded_BCHW.gather(2, y_BH[:, None, :, None].expand(b, c, h, w + 2 * s))
        return rows_BCHW.gather(3, x_BW[:, None, None, :].expand(b, c, h, w)).view(images.shape)
