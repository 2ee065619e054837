"""Random layers whose masks belong to the samples: the processes of a step draw together what one process draws.

An element of a mask is a hash of (seed, optimizer step, layer, call, row of the global batch, place in the sample by dimension), so the
mask of a sample does not depend on how far its batch is padded. Nothing is drawn from a generator, stored or sent. Outside of a step the
layers are torch's own.
"""

# N row: a sample of the micro-batch · K neighbours that a network makes of each sample · W word of 64 bits

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.compat.torch import in_backward
from lockstep.data import sampler
from lockstep.errors import UserError

GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's step
SELU = -1.7580993408473766  # minus SELU's scale times its alpha: what alpha dropout sets elements to


def key_of(*parts: object) -> int:
    """64 bits of what identifies a draw."""
    return int.from_bytes(hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest(), "big")


class MicroBatch:
    """The rows of the global batch that each device computes in a forward. `calls` counts the calls of each layer."""

    def __init__(self, seed: int, step: int | str, rows: Mapping[torch.device, range]) -> None:
        self.key, self.rows = key_of(seed, step), rows
        self.calls: dict[tuple[str, torch.device], int] = {}

    def call(self, layer: str, device: torch.device) -> int:
        """The number of this call of a layer. A call during backward computes the activations of an earlier one again.

        Raises:
            UserError: the layer was called several times, so it is unknown which of them this one repeats.
        """
        place = layer, device
        if not in_backward():
            self.calls[place] = self.calls.get(place, -1) + 1
        elif self.calls.get(place):
            raise UserError(
                f"activation checkpointing cannot repeat the masks of {layer}, which a step calls {self.calls[place] + 1} times. Give each "
                "call a layer of its own, or leave these activations out of checkpointing."
            )
        return self.calls.get(place, 0)

    def rows_of(self, device: torch.device, shape: Sequence[int]) -> tuple[range, int, int]:
        """The rows of the global batch that a tensor has, how many neighbours of each, and in which dimension: the second one in a sequence
        that comes first. From 0 on if the tensor has neither the samples, nor k of each, such as a table of positions.
        """
        rows = self.rows[device] if device in self.rows else next(iter(self.rows.values()))
        if shape[0] % len(rows) == 0:
            return rows, shape[0] // len(rows), 0
        return (rows, 1, 1) if len(shape) > 2 and shape[1] == len(rows) else (range(shape[0]), 1, 0)


@dataclass(frozen=True)
class Place:
    """What a mask belongs to: the call of a layer, rows of the global batch, and how many neighbours a network makes of each."""

    key: int  # of seed and step
    call: int
    rows: range
    neighbours: int = 1


current: MicroBatch | None = None  # of this process, not of a thread: the replicas of dp are threads


def begin(micro_batch: MicroBatch | None) -> None:
    """Of the forward that follows; None where masks belong to no sample."""
    global current
    current = micro_batch


def words(place: Place, sizes: Sequence[int], device: torch.device, *, on_host: bool) -> Tensor:
    """(N, K, *sizes) random int64; without K where there is one neighbour. `on_host`: with NumPy, in a quarter of torch's time for a
    small layer."""
    word: Any = np.uint64 if on_host else signed
    mixed: Any = sampler.mix if on_host else mix

    def numbers(part: range) -> Any:
        of_host = np.arange(part.start, part.stop, dtype=np.uint64) if on_host else None
        return (torch.arange(part.start, part.stop, device=device) if of_host is None else of_host) * word(GOLDEN)

    call, row_N = word(place.call), mixed(numbers(place.rows) + word(place.key))
    hashed = row_N
    if place.neighbours > 1:
        hashed = mixed(row_N[:, None] + (numbers(range(place.neighbours)) + call))
        hashed[:, 0] = row_N  # as if it were the only one: padding may decide how many there are
    for size in sizes:
        hashed = mixed(hashed[..., None] + (numbers(range(size)) + call))
    return torch.from_numpy(hashed.view(np.int64)) if on_host else hashed


def signed(value: int) -> int:
    """The int64 with the same bits as a uint64, because torch has no uint64 arithmetic."""
    return value - 2**64 if value >= 2**63 else value


def mix(x: Tensor) -> Tensor:
    """sampler.mix on the bits of int64."""
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        logically_shifted = (x >> bits) & ((1 << (64 - bits)) - 1)
        x = (x ^ logically_shifted) * signed(factor)
    return x


def kept_rows(words_NW: Tensor, elements: int, bits: int, limit: int) -> Tensor:
    """(N, ..., elements): 1 where a number of so many bits is at least `limit`; int8, or bool on GPUs.

    On CPUs with NumPy: torch 2.13 takes 0.7 ms to compare 590,000 bytes and to convert the result to floats, NumPy and int8 0.1.
    """
    numbers = words_NW.view(torch.int8 if bits == 8 else torch.int16)[..., :elements]
    return torch.from_numpy((numbers.numpy() >= limit).view(np.int8)) if numbers.is_cpu else numbers >= limit


class ByRow:
    """A dropout layer with masks by row: the first base of a class whose second base is the layer."""

    layer: str  # its name in the network
    original: type[nn.Module]
    training: bool
    whole_batch = False  # whether all samples share a mask

    def mask_shape(self, x: Tensor) -> tuple[int, ...]:
        """Rows first, without dimensions that share a mask at the end. Empty for an input that torch itself has to mask."""
        return tuple(x.shape)

    def masked(self, x: Tensor, kept: Tensor, p: float) -> Tensor:
        noise = kept.to(x.dtype).mul_(1 / (1 - p))
        return x.mul_(noise) if getattr(self, "inplace", False) else x * noise

    def forward(self, x: Tensor) -> Tensor:
        shape = self.mask_shape(x)
        p: Any = getattr(self, "drop_prob", None) or getattr(self, "p", 0.0)  # as timm's layer or torch's
        if current is None or not self.training or not 0 < p < 1 or 0 in (shape or (0,)):
            result: Tensor = super().forward(x)  # type: ignore[misc]  # the second base's
            return result
        bits = 8 if (p * 256).is_integer() else 16  # that express `p`, or round it
        dropped = min(max(1, round(p * 2**bits)), 2**bits - 1)
        rows, neighbours, dim = (range(1), 1, 0) if self.whole_batch else current.rows_of(x.device, shape)
        place = Place(current.key, key_of(self.layer, current.call(self.layer, x.device)), rows, neighbours)
        *outer, elements = (*shape[:dim], *shape[dim + 1 :]) or (1,)
        words_NW = words(place, (*outer, -(-elements * bits // 64)), x.device, on_host=x.is_cpu)
        kept = kept_rows(words_NW, elements, bits, dropped - 2 ** (bits - 1))  # numbers are signed
        kept = kept.reshape(shape[dim], *shape[:dim], *shape[dim + 1 :], *[1] * (x.dim() - len(shape)))
        return self.masked(x, kept.transpose(0, dim), dropped / 2**bits)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved whole, or copied, it is the layer that it was made of: classes made here cannot be imported by name."""
        return object.__new__, (self.original,), vars(self)


class ByChannel(ByRow):
    """Drops whole channels."""

    def mask_shape(self, x: Tensor) -> tuple[int, ...]:
        usual = next((dim for kind, dim in WITH_SAMPLES.items() if isinstance(self, kind)), x.dim())
        return tuple(x.shape[:2]) if x.dim() == usual else ()


class Alpha(ByRow):
    """Keeps the mean and variance of SELU's outputs (Klambauer et al., "Self-Normalizing Neural Networks", 2017)."""

    def masked(self, x: Tensor, kept: Tensor, p: float) -> Tensor:
        scale = ((1 - p) * (1 + p * SELU**2)) ** -0.5
        return x.where(kept.bool(), SELU) * scale - SELU * p * scale


class AlphaByChannel(Alpha, ByChannel):
    """Keeps or drops whole channels (`FeatureAlphaDropout`)."""


class BySample(ByRow):
    """Drops a branch of a sample (Huang et al., "Deep Networks with Stochastic Depth", 2016): timm's and torchvision's layer."""

    @property
    def whole_batch(self) -> bool:  # type: ignore[override]
        return getattr(self, "mode", "row") == "batch"

    def mask_shape(self, x: Tensor) -> tuple[int, ...]:
        return (1 if self.whole_batch else len(x),)

    def masked(self, x: Tensor, kept: Tensor, p: float) -> Tensor:
        return super().masked(x, kept, p if getattr(self, "scale_by_keep", True) else 0.0)


WITH_SAMPLES = {nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}  # dimensions of an input of several samples
LAYERS: dict[type[nn.Module], type[ByRow]] = {
    nn.Dropout: ByRow,
    **dict.fromkeys(WITH_SAMPLES, ByChannel),
    nn.AlphaDropout: Alpha,
    nn.FeatureAlphaDropout: AlphaByChannel,
}
OF_LIBRARIES = {"timm.layers": "DropPath", "torchvision.ops": "StochasticDepth"}


@cache
def with_rows(kind: Any, base: type[ByRow]) -> type[nn.Module]:
    return type(kind.__name__, (base, kind), {"__module__": kind.__module__, "original": kind})


def by_row(net: nn.Module) -> None:
    """Gives the dropout layers of a network masks by row, in place: hooks, sharing and state keys stay.

    Subclasses stay as they are: they may draw otherwise.
    """
    imported = {getattr(sys.modules[name], of): BySample for name, of in OF_LIBRARIES.items() if name in sys.modules}
    layers: dict[Any, Any] = LAYERS | imported
    for name, module in net.named_modules():
        kind: Any = type(module)
        if kind in layers:
            module.__class__ = with_rows(kind, layers[kind])
            module.layer = name


def rand(x: Tensor, *shape: int) -> Tensor:
    """(B, *shape) numbers from [0, 1), like `torch.rand`, for the samples that are the first dimension of `x`. In training they belong to
    the samples, as masks of dropout do: any number of processes draws those of one."""
    if current is None or 0 in (len(x), *shape):
        return torch.rand(len(x), *shape, device=x.device)
    rows, neighbours, _ = current.rows_of(x.device, (len(x),))
    place = Place(current.key, key_of("rand", current.call("rand", x.device)), rows, neighbours)
    words_BW = words(place, shape or (1,), x.device, on_host=x.is_cpu)
    return ((words_BW >> 40) & (2**24 - 1)).float().mul_(2**-24).reshape(len(x), *shape)
