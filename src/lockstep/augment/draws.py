"""Random numbers that are a function of (seed, epoch, sample): no generator, nothing to store, the same in every world."""

# B batch

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from lockstep.data import sampler


def signed(value: int) -> int:
    """The int64 with the same bits as a uint64, because torch has no uint64 arithmetic."""
    return value - 2**64 if value >= 2**63 else value


GOLDEN = signed(0x9E3779B97F4A7C15)  # SplitMix64's step (Steele, Lea, Flood 2014)
OF_COPY = signed(0xD1342543DE82EF95)  # another odd number, for the copies of a sample


def shifted_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift: zeros come in from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """sampler.mix on the device: SplitMix64's finalizer on the bits of int64."""
    x = (x ^ shifted_right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted_right(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shifted_right(x, 31)


def key_of(name: str, seed: int, epoch: int) -> int:
    """The key of one operation in one epoch. By name, so an operation that is added or left out changes no other's draws."""
    of_name = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    mixed = sampler.mix(np.array([of_name], np.uint64) ^ sampler.keys(seed, epoch)[:1])
    return int(mixed.view(np.int64)[0])


def wide(x: Tensor) -> Tensor:
    """In float64 where the device has it: vectorised float32 functions differ in the last bit with a number's place in a batch."""
    return x if x.device.type == "mps" else x.double()


class Draws:
    """The random numbers of one operation, one of each kind for each sample of a batch.

    The numbers of a sample depend on (seed, epoch, sample, copy, name) and on how many were drawn before. `repeats` samples in a
    row are copies of one.
    """

    def __init__(self, name: str, index_B: Tensor, *, seed: int, epoch: int, repeats: int = 1) -> None:
        self.name, self.repeats, self.drawn = name, repeats, 0
        self.place_B = torch.arange(len(index_B), device=index_B.device)
        copy_B = self.place_B % repeats
        self.state_B = mix(index_B * GOLDEN + copy_B * OF_COPY + key_of(name, seed, epoch))

    def bits(self, *shape: int) -> Tensor:
        """64 random bits as int64: (B, *shape). SplitMix64's stream of each sample."""
        count = math.prod(shape)
        number_N = torch.arange(self.drawn + 1, self.drawn + count + 1, device=self.state_B.device)
        self.drawn += count
        return mix(self.state_B[:, None] + number_N * GOLDEN).view(-1, *shape)

    def uniform(self, low: float = 0.0, high: float = 1.0, shape: tuple[int, ...] = ()) -> Tensor:
        """float32 numbers from `low` to `high`: (B, *shape)."""
        return shifted_right(self.bits(*shape), 40).float() * 2**-24 * (high - low) + low

    def below(self, bound: int | Tensor, shape: tuple[int, ...] = ()) -> Tensor:
        """Whole numbers from 0 to `bound` - 1, which may be another one for each sample: (B, *shape)."""
        return shifted_right(self.bits(*shape), 1) % bound

    def chance(self, probability: float) -> Tensor:
        """True in this share of samples: (B,)."""
        return self.uniform() < probability

    @property
    def partner_B(self) -> Tensor:
        """The place of each sample's partner: the neighbour in the global batch (0 and 1, 2 and 3, ...), of the same copy."""
        odd_B = self.place_B // self.repeats & 1
        return self.place_B + self.repeats * (1 - 2 * odd_B)
