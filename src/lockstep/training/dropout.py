"""Random layers whose masks belong to the samples, so the masks are the same on any number of processes.

An element of a mask is a hash of (seed, optimizer step, layer, call, row of the global batch, index in each dimension
of the sample), so the mask of a sample does not depend on how far its batch is padded. Nothing is drawn from a
generator, stored or sent. Outside a step, the layers behave like torch's.
"""

# N row: a sample of the micro-batch · K neighbouring rows that a network makes from each sample · W word of 64 bits

import hashlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.compat.torch import in_backward
from lockstep.data import sampler
from lockstep.errors import UserError

GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's step
SELU = -1.7580993408473766  # minus SELU's scale times its alpha: the value of elements dropped by alpha dropout


def key_of(*parts: object) -> int:
    """A 64-bit hash of the values that identify a draw."""
    return int.from_bytes(hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest(), "big")


class MicroBatch:
    """The rows of the global batch that each device computes in a forward pass. `calls` counts each layer's calls."""

    def __init__(self, seed: int, step: int | str, rows: Mapping[torch.device, range]) -> None:
        self.key, self.rows = key_of(seed, step), rows
        self.calls: dict[tuple[str, torch.device], int] = {}

    def call(self, layer: str, device: torch.device) -> int:
        """The index of this call of a layer. A call during backward recomputes the activations of an earlier call.

        Raises:
            UserError: the layer was called several times, so it is unknown which call this one repeats.
        """
        key = layer, device
        if not in_backward():
            self.calls[key] = self.calls.get(key, -1) + 1
        elif self.calls.get(key):
            raise UserError(
                f"activation checkpointing cannot repeat the masks of {layer}, which a step calls {self.calls[key] + 1} times. Use a "
                "separate layer for each call, or exclude these activations from checkpointing."
            )
        return self.calls.get(key, 0)

    def rows_of(self, device: torch.device, shape: Sequence[int]) -> tuple[range, int, int]:
        """The rows of the global batch in a tensor, how many neighbours each has, and their dimension.

        The dimension is the second for a tensor whose sequence comes first. Rows count from 0 if the tensor has neither
        the samples nor k of each, such as a table of positions.
        """
        rows = self.rows.get(device, next(iter(self.rows.values())))
        if shape[0] % len(rows) == 0:
            return rows, shape[0] // len(rows), 0
        return (rows, 1, 1) if len(shape) > 2 and shape[1] == len(rows) else (range(shape[0]), 1, 0)

    def words(self, layer: str, rows: range, neighbours: int, sizes: Sequence[int], device: torch.device) -> Tensor:
        """The random words of the next call of a layer."""
        call = key_of(layer, self.call(layer, device))
        return random_words(self.key, call, rows, neighbours, sizes, device, on_host=device.type == "cpu")


current: MicroBatch | None = None  # of this process, not of a thread: dp's replicas are threads


def begin(micro_batch: MicroBatch | None) -> None:
    """Sets the micro-batch of the next forward pass; None if masks belong to no sample."""
    global current
    current = micro_batch


def random_words(
    key: int, call: int, rows: range, neighbours: int, sizes: Sequence[int], device: torch.device, *, on_host: bool
) -> Tensor:
    """(N, K, *sizes) random int64 for K neighbours of each row; without K if there is one.

    `key` is a hash of seed and step. `on_host`: computes with NumPy, which takes a quarter of torch's time for a small
    layer.
    """
    word: Any = np.uint64 if on_host else signed
    mix_fn: Any = sampler.mix if on_host else mix

    def multiples(span: range) -> Any:
        host = np.arange(span.start, span.stop, dtype=np.uint64) if on_host else None
        return (torch.arange(span.start, span.stop, device=device) if host is None else host) * word(GOLDEN)

    hashes = row_N = mix_fn(multiples(rows) + word(key))
    if neighbours > 1:
        hashes = mix_fn(row_N[:, None] + (multiples(range(neighbours)) + word(call)))
        hashes[:, 0] = row_N  # as if it were the only neighbour: their number may depend on padding
    for size in sizes:
        hashes = mix_fn(hashes[..., None] + (multiples(range(size)) + word(call)))
    return torch.from_numpy(hashes.view(np.int64)) if on_host else hashes


def signed(value: int) -> int:
    """The int64 with the same bits as a uint64, because torch has no uint64 arithmetic."""
    return value - 2**64 if value >= 2**63 else value


def mix(x: Tensor) -> Tensor:
    """sampler.mix on the bits of int64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        logically_shifted = (x >> shift) & ((1 << (64 - shift)) - 1)
        x = (x ^ logically_shifted) * signed(factor)
    return x


def kept_rows(words_NW: Tensor, elements: int, bits: int, limit: int) -> Tensor:
    """(N, ..., elements): 1 where a number of `bits` bits is at least `limit`; int8 on CPUs, bool on GPUs.

    CPUs use NumPy: to compare 590,000 bytes and convert the result to floats, torch 2.13 takes 0.7 ms, NumPy with int8
    0.1 ms.
    """
    numbers = words_NW.view(torch.int8 if bits == 8 else torch.int16)[..., :elements]
    return torch.from_numpy((numbers.numpy() >= limit).view(np.int8)) if numbers.is_cpu else numbers >= limit


class RowDropout:
    """A dropout layer with a mask per row: the first base of a class whose second base is the layer's class."""

    layer: str  # its name in the network
    original: type[nn.Module]
    training: bool
    whole_batch = False  # whether all samples share a mask

    def mask_shape(self, x: Tensor) -> tuple[int, ...]:
        """Rows first, without trailing dimensions that share a mask. Empty for an input that torch itself must mask."""
        return tuple(x.shape)

    def masked(self, x: Tensor, keep_mask: Tensor, p: float) -> Tensor:
        noise = keep_mask.to(x.dtype).mul_(1 / (1 - p))
        return x.mul_(noise) if getattr(self, "inplace", False) else x * noise

    def forward(self, x: Tensor) -> Tensor:
        shape = self.mask_shape(x)
        p: Any = getattr(self, "drop_prob", None) or getattr(self, "p", 0.0)  # timm's layers have drop_prob, torch's p
        if current is None or not self.training or not 0 < p < 1 or 0 in (shape or (0,)):
            unmasked: Tensor = super().forward(x)  # type: ignore[misc]  # of the second base
            return unmasked
        bits = 8 if (p * 256).is_integer() else 16  # enough to represent `p`, or to round it
        dropped = min(max(1, round(p * 2**bits)), 2**bits - 1)
        rows, neighbours, dim = (range(1), 1, 0) if self.whole_batch else current.rows_of(x.device, shape)
        *outer, elements = (*shape[:dim], *shape[dim + 1 :]) or (1,)
        words_NW = current.words(self.layer, rows, neighbours, (*outer, -(-elements * bits // 64)), x.device)
        keep_mask = kept_rows(words_NW, elements, bits, dropped - 2 ** (bits - 1))  # numbers are signed
        keep_mask = keep_mask.reshape(shape[dim], *shape[:dim], *shape[dim + 1 :], *[1] * (x.dim() - len(shape)))
        return self.masked(x, keep_mask.transpose(0, dim), dropped / 2**bits)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies as the original layer: the classes made here cannot be imported by name."""
        return object.__new__, (self.original,), vars(self)


class ChannelDropout(RowDropout):
    """Drops whole channels."""

    def mask_shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape[:2]) if x.dim() == WITH_SAMPLES.get(self.original, x.dim()) else ()


class AlphaRowDropout(RowDropout):
    """Keeps the mean and variance of SELU's outputs (Klambauer et al., "Self-Normalizing Neural Networks", 2017)."""

    def masked(self, x: Tensor, keep_mask: Tensor, p: float) -> Tensor:
        scale = ((1 - p) * (1 + p * SELU**2)) ** -0.5
        return x.where(keep_mask.bool(), SELU) * scale - SELU * p * scale


class AlphaChannelDropout(AlphaRowDropout, ChannelDropout):
    """Keeps or drops whole channels (`FeatureAlphaDropout`)."""


class StochasticDepth(RowDropout):
    """Drops a branch per sample, as timm's and torchvision's layers do.

    Huang et al., "Deep Networks with Stochastic Depth", 2016.
    """

    @property
    def whole_batch(self) -> bool:  # type: ignore[override]
        return getattr(self, "mode", "row") == "batch"

    def mask_shape(self, x: Tensor) -> tuple[int, ...]:
        return (1 if self.whole_batch else len(x),)

    def masked(self, x: Tensor, keep_mask: Tensor, p: float) -> Tensor:
        return super().masked(x, keep_mask, p if getattr(self, "scale_by_keep", True) else 0.0)


# number of dimensions of a batched input
WITH_SAMPLES: dict[type[nn.Module], int] = {nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}
LAYERS: dict[type[nn.Module], type[RowDropout]] = {
    nn.Dropout: RowDropout,
    **dict.fromkeys(WITH_SAMPLES, ChannelDropout),
    nn.AlphaDropout: AlphaRowDropout,
    nn.FeatureAlphaDropout: AlphaChannelDropout,
}
OF_LIBRARIES = {"timm.layers": "DropPath", "torchvision.ops": "StochasticDepth"}


@cache
def row_dropout_class(cls: Any, base: type[RowDropout]) -> type[nn.Module]:
    return type(cls.__name__, (base, cls), {"__module__": cls.__module__, "original": cls})


def use_row_masks(net: nn.Module) -> None:
    """Gives the dropout layers of a network a mask per row, in place. Hooks, sharing and state keys do not change.

    Subclasses of these layers do not change: they may draw differently.
    """
    imported = {getattr(sys.modules[lib], name) for lib, name in OF_LIBRARIES.items() if lib in sys.modules}
    layers: dict[Any, Any] = LAYERS | dict.fromkeys(imported, StochasticDepth)
    for name, module in net.named_modules():
        cls: Any = type(module)
        if cls in layers:
            module.__class__ = row_dropout_class(cls, layers[cls])
            module.layer = name


def rand(x: Tensor, *shape: int) -> Tensor:
    """(B, *shape) numbers from [0, 1), like `torch.rand`, for the samples in the first dimension of `x`.

    In training, the numbers belong to the samples, like dropout masks: they are the same on any number of processes.
    """
    if current is None or 0 in (len(x), *shape):
        return torch.rand(len(x), *shape, device=x.device)
    rows, neighbours, _ = current.rows_of(x.device, (len(x),))
    words_BW = current.words("rand", rows, neighbours, shape or (1,), x.device)
    return ((words_BW >> 40) & (2**24 - 1)).float().mul_(2**-24).reshape(len(x), *shape)
