"""Base classes of augmentation, their random numbers, and how a run applies them.

An operation receives training batches on their device, before `preprocess`: images are bytes (uint8, BCHW). It does not
depend on processes, seeds or epochs. All its randomness comes from `draws`, which is a function of (seed, epoch,
sample). Modules with classes that configs name import torch only when a batch arrives, so a config is checked before
torch is imported.
"""

# B batch · C channel · H W pixel · N number

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from lockstep import Batch, Indices, UserError, sampler
from lockstep.kit.images import spatial

if TYPE_CHECKING:
    from torch import Tensor, device

# --- Random numbers as a function of (seed, epoch, sample): no generator, no state, the same for any world size ---


class Draws:
    """The random numbers of one operation as NumPy arrays, one of each kind for each sample of a batch.

    A sample's numbers depend on (seed, epoch, place in the epoch, name) and on how many were drawn before. They are drawn
    on the host, so an operation can read them without waiting for a GPU; `tensor` moves them to the device.
    """

    def __init__(
        self, name: str, place_B: Indices, *, seed: int, epoch: int, repeats: int = 1, device: "device | str" = "cpu"
    ) -> None:
        self.name, self.device, self.repeats, self.drawn = name, device, repeats, 0
        self.row_B = np.arange(len(place_B))
        self.state_B = sampler.sample_states(name, place_B, seed=seed, epoch=epoch)

    def bits(self, *shape: int) -> NDArray[np.uint64]:
        """64 random bits: (B, *shape). SplitMix64's stream of each sample."""
        count = math.prod(shape)
        number_N = np.arange(self.drawn + 1, self.drawn + count + 1, dtype=np.uint64)
        self.drawn += count
        return sampler.mix(self.state_B[:, None] + number_N * sampler.GOLDEN).reshape(len(self.row_B), *shape)

    def noise(self, index: int, count: int) -> NDArray[np.uint8]:
        """Random bytes of one sample. Must be the last draw of an operation, because it does not count as drawn."""
        number_N = np.arange(self.drawn + 1, self.drawn + 1 + -(-count // 8), dtype=np.uint64)
        return sampler.mix(self.state_B[index] + number_N * sampler.GOLDEN).view(np.uint8)[:count]

    def uniform(self, low: float = 0.0, high: float = 1.0, shape: tuple[int, ...] = ()) -> NDArray[np.float32]:
        """float32 numbers from `low` to `high`: (B, *shape)."""
        return (self.bits(*shape) >> np.uint64(40)).astype(np.float32) * 2**-24 * (high - low) + low

    def below(self, bound: int | Indices, shape: tuple[int, ...] = ()) -> Indices:
        """Integers from 0 to `bound` - 1, where `bound` may differ between samples: (B, *shape)."""
        return (self.bits(*shape) >> np.uint64(1)).view(np.int64) % bound

    def chance(self, probability: float) -> NDArray[np.bool_]:
        """True with this probability: (B,)."""
        return self.uniform() < probability

    def tensor(self, array: NDArray[Any]) -> "Tensor":
        """Moves numbers to the device of the batch."""
        return to_device(self.device, array)

    @property
    def partner_B(self) -> "Tensor":
        """The index of each sample's partner.

        It is the neighbour in the global batch (0 and 1, 2 and 3, ...), of the same copy.
        """
        return self.tensor(self.row_B + self.repeats * (1 - 2 * (self.row_B // self.repeats & 1)))


def to_device(device: "device | str", array: NDArray[Any]) -> "Tensor":
    """Moves an array without waiting for the device."""
    import torch

    return torch.from_numpy(array).to(device, non_blocking=True)


# --- Types of arguments ---

STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def require_rising(pair: Sequence[float]) -> Sequence[float]:
    if pair[0] > pair[1]:
        raise ValueError("the lower number must come first")
    return pair


Probability = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Byte = Annotated[int, Field(ge=0, le=255)]
MaskValue = Annotated[int, Field(ge=-(2**31), lt=2**31)] | None
PAIR = (Field(min_length=2, max_length=2), AfterValidator(require_rising))


class Checked:
    """Base class of dataclasses whose annotations define the allowed values."""

    def __post_init__(self) -> None:
        """Raises ValueError if the annotation of a field excludes its value."""
        errors = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            try:
                TypeAdapter(field.type, config=STRICT).validate_python(value)  # type: ignore[arg-type]
            except ValidationError as e:
                errors.append(f"{field.name}={value} is invalid: {e.errors()[-1]['msg'].removeprefix('Value error, ')}")
        if errors:
            raise ValueError("; ".join(errors))


# --- Base classes ---


class Operation:
    """Changes a batch.

    To be exact, a sample's result must depend only on that sample and its `draws`. To be fast, an operation must not
    read values of a tensor (`.item()`, `if tensor`, boolean indexing), for which the CPU would wait.

    It computes element by element, or image by image: matrix products and reductions of floats may round differently in
    batches of a different size, so a sample would depend on how many others share its micro-batch.
    """

    mixes: ClassVar[bool] = False  # whether it mixes samples with their partners; runs after those that do not
    at_reading: ClassVar[bool] = False  # transforms of one sample run where it is read, before the others

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        raise NotImplementedError


class PixelOperation(Operation):
    """Changes the values of pixels without moving them."""

    def change(self, image_BCHW: "Tensor", draws: Draws) -> "Tensor":
        """From bytes to bytes."""
        raise NotImplementedError

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        return {**batch, "input": self.change(images_of(batch, draws.name), draws)}


class GeometricOperation(Operation):
    """Moves pixels, and moves the masks of a batch with their images."""

    uncovers: bool = False  # whether it leaves pixels to which no pixel of the image has moved
    mask_fill: int | None = None  # their value in masks

    def plan(self, height: int, width: int, draws: Draws) -> Any:
        """The random parameters for images of this size."""
        raise NotImplementedError

    def move(self, value_BCHW: "Tensor", plan: Any, *, is_mask: bool) -> "Tensor":
        """Moves images of bytes, or masks of any type, whose values cannot be mixed."""
        raise NotImplementedError

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        image, masks, name = images_of(batch, draws.name), spatial(batch), draws.name
        for key, mask in masks.items():
            if getattr(mask, "shape", ())[-2:] != image.shape[-2:]:
                raise UserError(
                    f"{name} cannot move `{key}`, {form_of(mask)}, with images of {tuple(image.shape[-2:])}. Remove it: ~{name}, or write your own operation that can (docs/augment.md)."
                )
        if masks and self.uncovers and self.mask_fill is None:
            raise UserError(
                f"{name} uncovers pixels, which need a value in `{next(iter(masks))}`. Set {name}.mask_fill=<value>, for example the task's ignore_index, or remove it: ~{name}."
            )
        height, width = image.shape[-2:]
        plan = self.plan(height, width, draws)
        result = {"input": self.move(image, plan, is_mask=False)}
        for key, mask in masks.items():
            moved_mask = self.move(mask.reshape(len(mask), -1, *mask.shape[-2:]), plan, is_mask=True)
            result[key] = moved_mask.reshape(*mask.shape[:-2], *moved_mask.shape[-2:])
        return {**batch, **result}


def images_of(batch: Batch, name: str) -> "Tensor":
    """The images of a batch. Raises UserError if `input` is not images of bytes and one size."""
    image: Any = batch.get("input")
    if getattr(image, "ndim", 0) != 4 or image.element_size() != 1 or image.is_floating_point():
        raise UserError(
            f"{name} needs uint8 images of one size (BCHW), but `input` is {form_of(image)}. Crop them first, for example with augment=crop, or remove it: ~{name}."
        )
    return image  # type: ignore[no-any-return]


def form_of(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return f"{str(getattr(value, 'dtype', type(value).__name__)).removeprefix('torch.')}{shape}"
