"""Augmentation's base classes, their random numbers, and how a run applies them.

An operation gets training batches on their device, before `preprocess`: images are bytes (uint8, BCHW). It knows nothing of
processes, seeds or epochs. All its randomness comes from `draws`, which is a function of (seed, epoch, sample). The modules whose
classes configs name import torch when a batch comes, so a config is checked before torch is imported.
"""

# B batch · C channel · H W pixel · N number

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from lockstep.data import sampler
from lockstep.data.dataset import Batch, Indices, flat
from lockstep.data.places import spatial
from lockstep.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, device

# --- Random numbers that are a function of (seed, epoch, sample): no generator, nothing to store, the same in every world ---


class Draws:
    """The random numbers of one operation as NumPy arrays, one of each kind for each sample of a batch.

    A sample's numbers depend on (seed, epoch, sample, copy, name) and on how many were drawn before. `repeats` samples in a row are
    copies of one. They are drawn on the host, so an operation can read them without waiting for a GPU; `tensor` moves them there.
    """

    def __init__(
        self, name: str, index_B: Indices, *, seed: int, epoch: int, repeats: int = 1, device: "device | str" = "cpu"
    ) -> None:
        self.name, self.device, self.repeats, self.drawn = name, device, repeats, 0
        self.place_B = np.arange(len(index_B))
        self.state_B = sampler.sample_states(name, index_B, seed=seed, epoch=epoch, repeats=repeats)

    def bits(self, *shape: int) -> NDArray[np.uint64]:
        """64 random bits: (B, *shape). SplitMix64's stream of each sample."""
        count = math.prod(shape)
        number_N = np.arange(self.drawn + 1, self.drawn + count + 1, dtype=np.uint64)
        self.drawn += count
        return sampler.mix(self.state_B[:, None] + number_N * sampler.GOLDEN).reshape(len(self.place_B), *shape)

    def noise(self, place: int, count: int) -> NDArray[np.uint8]:
        """Random bytes of one sample. The last draw of an operation: it does not count as drawn."""
        number_N = np.arange(self.drawn + 1, self.drawn + 1 + -(-count // 8), dtype=np.uint64)
        return sampler.mix(self.state_B[place] + number_N * sampler.GOLDEN).view(np.uint8)[:count]

    def uniform(self, low: float = 0.0, high: float = 1.0, shape: tuple[int, ...] = ()) -> NDArray[np.float32]:
        """float32 numbers from `low` to `high`: (B, *shape)."""
        return (self.bits(*shape) >> np.uint64(40)).astype(np.float32) * 2**-24 * (high - low) + low

    def below(self, bound: int | Indices, shape: tuple[int, ...] = ()) -> Indices:
        """Whole numbers from 0 to `bound` - 1, which may differ between samples: (B, *shape)."""
        return (self.bits(*shape) >> np.uint64(1)).view(np.int64) % bound

    def chance(self, probability: float) -> NDArray[np.bool_]:
        """True with this probability: (B,)."""
        return self.uniform() < probability

    def tensor(self, array: NDArray[Any]) -> "Tensor":
        """Numbers on the device of the batch."""
        return on(self.device, array)

    @property
    def partner_B(self) -> "Tensor":
        """The place of each sample's partner: the neighbour in the global batch (0 and 1, 2 and 3, ...), of the same copy."""
        return self.tensor(self.place_B + self.repeats * (1 - 2 * (self.place_B // self.repeats & 1)))


def on(device: "device | str", array: NDArray[Any]) -> "Tensor":
    """Without waiting for the device."""
    import torch

    return torch.from_numpy(array).to(device, non_blocking=True)


# --- The values that arguments take ---

STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def rising(pair: Sequence[float]) -> Sequence[float]:
    if pair[0] > pair[1]:
        raise ValueError("the lower number comes first")
    return pair


Probability = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Byte = Annotated[int, Field(ge=0, le=255)]
MaskValue = Annotated[int, Field(ge=-(2**31), lt=2**31)] | None
PAIR = (Field(min_length=2, max_length=2), AfterValidator(rising))


class Checked:
    """Base class of dataclasses whose annotations say which values are allowed."""

    def __post_init__(self) -> None:
        """Raises ValueError: a field has a value that its annotation excludes."""
        wrong = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            try:
                TypeAdapter(field.type, config=STRICT).validate_python(value)  # type: ignore[arg-type]
            except ValidationError as e:
                wrong.append(f"{field.name}={value} is invalid: {e.errors()[-1]['msg'].removeprefix('Value error, ')}")
        if wrong:
            raise ValueError("; ".join(wrong))


# --- Base classes ---


class Operation:
    """Changes a batch. To stay exact, a sample's result depends on that sample and its `draws` alone; and to stay fast, an
    operation reads no value of a tensor (`.item()`, `if tensor`, boolean indexing), for which the CPU would wait.

    It computes element by element, or image by image: matrix products and reductions of floats may round differently in batches of
    another size, and then a sample would depend on how many others share its micro-batch.
    """

    mixes: ClassVar[bool] = False  # whether it mixes samples with their partners; runs after those that do not
    at_reading: ClassVar[bool] = False  # whether it runs where samples are read; before the others
    drawn: ClassVar[str] = ""  # what a checkpoint says of its random numbers, to be resumed with the same
    # If it crops images of any size to one: the shorter side that it needs in pixels, 0 for the original.
    crops_from: int | None = None

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        raise NotImplementedError


class PixelOperation(Operation):
    """Changes the pixels of images and leaves everything in its place."""

    def change(self, image_BCHW: "Tensor", draws: Draws) -> "Tensor":
        """Of bytes, to bytes."""
        raise NotImplementedError

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        return {**batch, "input": self.change(images_of(batch, draws.name), draws)}


class GeometricOperation(Operation):
    """Moves pixels, and the masks of a batch with their images."""

    uncovers: bool = False  # whether pixels appear that no pixel of the image has moved to
    mask_fill: int | None = None  # their value in masks

    def plan(self, height: int, width: int, draws: Draws) -> Any:
        """What the draws decide, for images of this size."""
        raise NotImplementedError

    def move(self, value_BCHW: "Tensor", plan: Any, *, is_mask: bool) -> "Tensor":
        """Images of bytes; or masks of any type, whose values cannot be mixed."""
        raise NotImplementedError

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        image, masks, name = images_of(batch, draws.name), spatial(batch, nested=True), draws.name
        for key, mask in masks.items():
            if getattr(mask, "shape", ())[-2:] != image.shape[-2:]:
                what = f"`{key}` of shape {tuple(mask.shape)}" if hasattr(mask, "shape") else f"what `{key}` holds"
                raise UserError(
                    f"{name} cannot move {what} with images of {tuple(image.shape[-2:])}. "
                    f"Remove it: ~{name}; or write your own operation that can (docs/augment.md)."
                )
        if masks and self.uncovers and self.mask_fill is None:
            raise UserError(
                f"{name} uncovers pixels, and `{next(iter(masks))}` needs a value for them. Set {name}.mask_fill=<value>, "
                f"for example the task's ignore_index; or remove it: ~{name}."
            )
        height, width = image.shape[-2:]
        plan = self.plan(height, width, draws)
        result = {"input": self.move(image, plan, is_mask=False)}
        for key, mask in masks.items():
            moved = self.move(mask.reshape(len(mask), -1, *mask.shape[-2:]), plan, is_mask=True)
            result[key] = moved.reshape(*mask.shape[:-2], *moved.shape[-2:])
        return {**batch, **result}


def images_of(batch: Batch, name: str) -> "Tensor":
    """The images of a batch. Raises UserError if `input` is something else."""
    image: Tensor | None = batch.get("input")
    if isinstance(image, list):
        raise UserError(
            f"{name} changes images of one size, and `input` has several. Crop or resize them first, such as by augment=crop; or remove it: ~{name}."
        )
    if image is None:
        raise UserError(f"{name} changes `input`, and a batch holds {', '.join(batch)}. Remove it: ~{name}.")
    if image.dim() != 4 or image.element_size() != 1 or image.is_floating_point():
        raise UserError(
            f"{name} changes images of bytes (uint8, BCHW); `input` is {str(image.dtype).removeprefix('torch.')} of shape "
            f"{tuple(image.shape)}. Remove it: ~{name}."
        )
    return image


# --- All operations of a run ---

UNSEEDED = (
    "augment.{0} changes a sample in another way when it is seeded alike once more: it draws from something that is not found, or cannot be "
    "seeded, such as os.urandom. Keep its generators in attributes, or remove it: ~augment.{0}."
)


class Augmentation:
    """Applies operations in the order of the mapping: first those that run where samples are read, last those that mix samples."""

    def __init__(self, operations: Mapping[str, Any]) -> None:
        from lockstep.augment.samples import SampleTransform  # which inherits from Operation

        known = {n: each if isinstance(each, Operation) else SampleTransform(each) for n, each in operations.items()}
        ordered = sorted(known.items(), key=lambda item: (not item[1].at_reading, item[1].mixes))  # a stable sort
        self.operations = dict(ordered)
        self.reads = any(operation.at_reading for operation in known.values())
        self.drawn = ["keyed", *sorted({each.drawn for each in known.values() if each.drawn})]
        self.crops_from = next((each.crops_from for each in known.values() if each.at_reading), None)  # of the first

    def __call__(self, batch: Batch, **of_step: Any) -> Batch:
        """Both parts, of samples as they are read. The arguments are those of `applied`."""
        return self.on_device(self.at_reading(batch, **of_step), **of_step)

    def at_reading(self, batch: Batch, **of_step: Any) -> Batch:
        return self.applied(batch, True, **of_step)

    def on_device(self, batch: Batch, **of_step: Any) -> Batch:
        return self.applied(batch, False, **of_step)

    def check(self, batch: Batch) -> None:
        """Of a few samples. Raises UserError: a transform gives something else when it is seeded alike once more."""
        for name, operation in self.operations.items():
            if operation.at_reading:
                index_B = batch["index"].numpy()
                made, again = (operation(batch, Draws(f"augment.{name}", index_B, seed=0, epoch=0)) for _ in range(2))
                pairs = zip(flat(made), flat(again), strict=True)
                if not all(a.equal(b) if hasattr(a, "equal") else np.array_equal(a, b) for a, b in pairs):
                    raise UserError(UNSEEDED.format(name))
                batch = made

    def applied(
        self, batch: Batch, at_reading: bool, *, seed: int, epoch: int, repeats: int = 1, index_B: Indices | None = None
    ) -> Batch:
        """The operations that run where samples are read, or the others.

        `seed`, `epoch`: of the random numbers. `repeats`: so many samples in a row are copies of one, which get different ones (Hoffer
        et al., "Augment your batch", 2020). `index_B`: the batch's `index` on the host, because reading it from a GPU waits for the GPU.
        """
        index_B = batch["index"].cpu().numpy() if index_B is None else index_B
        of_sample: dict[str, Any] = {"seed": seed, "epoch": epoch, "repeats": repeats, "device": batch["index"].device}
        for name, operation in self.operations.items():
            if operation.at_reading == at_reading:
                batch = operation(batch, Draws(f"augment.{name}", index_B, **of_sample))
        return batch
