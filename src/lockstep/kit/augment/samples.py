"""Transforms of one sample, from torchvision, timm, albumentations or a project. They run where samples are read.

Every random number that they draw, from any generator, is a function of (seed, epoch, sample, copy, name of the
transform).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from lightning_utilities.core.apply_func import apply_to_collection
from pydantic import Field

from lockstep import Batch, Indices, UserError, is_pillow, leaves_of
from lockstep.kit.augment.operation import (
    PAIR,
    Amount,
    Byte,
    Checked,
    Count,
    Draws,
    Fraction,
    MaskValue,
    Operation,
    Positive,
)
from lockstep.kit.augment.transforms import ATTEMPTS
from lockstep.kit.pixels import chw
from lockstep.kit.spatial import has_places

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from lockstep import Generators

Sample = dict[str, Any]  # the values of a batch for one sample: `input` as uint8 (C, H, W), `target`, ...
Interpolation = Literal["nearest", "bilinear"]


class SampleTransform(Operation):
    """Applies `transform` to each sample of a batch.

    Transforms of torchvision.transforms.v2 and of a project get the sample as a dict, with `input` as tv_tensors.Image
    and masks as Mask. Those of albumentations get the image and `masks`, those of timm a PIL image, and those of
    torchvision.transforms a tensor.
    """

    at_reading = True
    moves: ClassVar[bool] = True  # whether it may move pixels
    transform: Any

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    @cached_property
    def generators(self) -> "Generators":
        from lockstep import Generators

        return Generators(self.transform)

    @property
    def crops_from(self) -> int | None:  # type: ignore[override]
        """Also for transforms of timm and albumentations, if they always crop."""
        always = getattr(self.transform, "p", 1) == 1
        return 0 if always and "RandomResizedCrop" in type(self.transform).__name__ else None

    @cached_property
    def library(self) -> str:
        """A key of LIBRARIES; "" for a project's own transform."""
        modules = [base.__module__ for base in type(self.transform).__mro__]
        return next((name for name in LIBRARIES if any(module.startswith(name) for module in modules)), "")

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        inputs = {name: value for name, value in batch.items() if name not in ("index", "count")}
        spatial = [name for name, v in inputs.items() if name != "input" and has_places(v)] if self.moves else []

        plan_B = self.plan(draws)

        def change(index: int) -> Sample:
            location, plan = f"{draws.name}, sample {batch['index'][index]}", None if plan_B is None else plan_B[index]
            try:
                # a copy, because a library's transform may write to its input
                sample = {name: sample_value(value, index, copied=plan is None) for name, value in inputs.items()}
                return self.change(sample, spatial, plan)
            except UnsupportedTransform as e:
                raise UserError(f"{location}: {e} Or remove it: ~{draws.name}.") from None
            except Exception as e:
                if not type(self.transform).__module__.startswith((*LIBRARIES,)):
                    e.add_note(f"in {location}")
                    raise
                raise UserError(f"{location}: {type(e).__name__}: {e}. Fix it, or remove it: ~{draws.name}.") from e

        if plan_B is None:
            results = self.generators.each(len(draws.state_B), lambda: draws.state_B, change)
        else:
            results = [change(index) for index in range(len(plan_B))]
        lists = [name for name, value in inputs.items() if isinstance(value, list) and name != "input"]
        values = {name: [sample[name] for sample in results] for name in results[0]}
        return {**batch, **{name: column if name in lists else join_values(column) for name, column in values.items()}}

    def plan(self, draws: Draws) -> Sequence[Any] | None:
        """The random parameters of each sample; None if they come from generators, which take longer to seed."""
        return None

    def apply(self, sample: Sample, plan: Any) -> Any:
        return LIBRARIES[self.library](self.transform, sample) if self.library else self.transform(sample)

    def change(self, sample: Sample, spatial: Sequence[str], plan: Any = None) -> Sample:
        """Raises UnsupportedTransform if masks or boxes would be lost, or if images are not bytes before and after it."""
        if is_pillow(sample.get("input")):
            sample = {**sample, "input": tensor_of(sample["input"])}
        image = sample.get("input")
        if is_image := str(getattr(image, "dtype", "")).endswith("uint8") and image.ndim == 3:  # type: ignore[union-attr]
            sample = {**sample, **wrap_sample(sample, spatial, strict=bool(self.library))}
        elif self.library:
            raise UnsupportedTransform(f"it needs uint8 images (CHW), but `input` is {form_of(image)}.")
        if spatial and LIBRARIES.get(self.library) in (apply_to_tensor, apply_to_pillow):
            raise UnsupportedTransform(f"it moves only the image, not `{spatial[0]}`. Use torchvision.transforms.v2.")
        result = unwrap(self.apply(sample, plan))
        if is_image and not str(getattr(result["input"], "dtype", "")).endswith("uint8"):
            raise UnsupportedTransform(
                f"it returns {form_of(result['input'])}. Images stay uint8 until they are normalised on the device: remove ToDtype and Normalize."
            )
        return result


class UnsupportedTransform(Exception):
    """Its message is a sentence about a transform."""


def form_of(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return f"{str(getattr(value, 'dtype', type(value).__name__)).removeprefix('torch.')}{shape}"


def sample_value(value: Any, index: int, *, copied: bool) -> Any:
    """The value of one sample in a batch."""
    if isinstance(value, Mapping):
        return {name: sample_value(item, index, copied=copied) for name, item in value.items()}
    import torch

    return apply_to_collection(value[index], torch.Tensor, torch.Tensor.clone) if copied else value[index]


def join_values(values: list[Any]) -> Any:
    """A tensor of all samples if they have the same shape, else a list."""
    import torch

    first = values[0]
    if isinstance(first, int | float):
        return torch.as_tensor(values)
    if isinstance(first, dict):
        return {name: join_values([value[name] for value in values]) for name in first}
    same_shape = all(type(value) is torch.Tensor and value.shape == first.shape for value in values)
    return torch.stack(values) if same_shape else values


def wrap_sample(sample: Sample, spatial: Sequence[str], *, strict: bool) -> Sample:
    """The image and values with positions in it, as tv_tensors. With `strict`, raises UnsupportedTransform for unknown values."""
    from torchvision.tv_tensors import Image, Mask, TVTensor

    image = sample["input"]

    def wrap(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: wrap(item) if has_places(item, 1) else item for key, item in value.items()}
        if isinstance(value, TVTensor) or getattr(value, "shape", ())[-2:] == image.shape[-2:]:
            return value if isinstance(value, TVTensor) else Mask(value)
        if strict:
            raise UnsupportedTransform(
                f"it cannot move {form_of(value)}. Return tv_tensors.BoundingBoxes, KeyPoints or Mask from the data set."
            )
        return value

    return {"input": Image(image), **{name: wrap(sample[name]) for name in spatial}}


def unwrap(value: Any) -> Any:
    """Converts arrays, images and masks to tensors. Boxes and keypoints do not change."""
    import torch
    from torchvision.tv_tensors import Image, Mask

    if isinstance(value, Mapping):
        return {name: unwrap(item) for name, item in value.items()}
    if isinstance(value, Image | Mask):
        return value.as_subclass(torch.Tensor)
    return torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value


def tensor_of(image: "Image") -> "Tensor":
    """image_CHW, stored as HWC, which torch resizes three times as fast."""
    import torch

    return torch.from_numpy(chw(image))


def hwc(image_CHW: Any) -> Any:
    return np.ascontiguousarray(image_CHW.numpy().transpose(1, 2, 0))


# --- The input of each library's transforms ---


def apply_to_tensor(transform: Any, sample: Sample) -> Sample:
    return {**sample, "input": transform(unwrap(sample["input"]))}


def apply_to_pillow(transform: Any, sample: Sample) -> Sample:
    from PIL import Image

    array_HWC = hwc(sample["input"])
    image = transform(Image.fromarray(array_HWC[..., 0] if array_HWC.shape[2] == 1 else array_HWC))
    return {**sample, "input": chw(image) if isinstance(image, Image.Image) else image}


def apply_albumentations(transform: Any, sample: Sample) -> Sample:
    import torch
    from torchvision.tv_tensors import Mask

    masks = {name: value for name, value in sample.items() if isinstance(value, Mask)}
    if unmoved := [
        name for name, value in sample.items() if name not in masks and has_places(value, 1) and name != "input"
    ]:
        raise UnsupportedTransform(
            f"albumentations moves only images and masks here, not `{unmoved[0]}`. Use torchvision.transforms.v2."
        )
    if not_2d := [name for name, value in masks.items() if value.ndim != 2]:
        raise UnsupportedTransform(
            f"`{not_2d[0]}` is {form_of(masks[not_2d[0]])}, but albumentations needs masks (H, W). Use torchvision.transforms.v2."
        )
    arrays = [value.to(torch.uint8 if value.dtype == torch.bool else value.dtype).numpy() for value in masks.values()]
    result = transform(image=hwc(sample["input"]), **({"masks": arrays} if masks else {}))
    new_masks = {
        n: torch.from_numpy(np.array(a)).to(masks[n].dtype) for n, a in zip(masks, result.get("masks", ()), strict=True)
    }
    return {**sample, **new_masks, "input": chw(result["image"])}


LIBRARIES: Mapping[str, Callable[[Any, Sample], Sample]] = {
    "albumentations.": apply_albumentations,
    "timm.data.random_erasing": apply_to_tensor,
    "timm.": apply_to_pillow,
    "torchvision.transforms.v2": lambda transform, sample: dict(transform(sample)),
    "torchvision.": apply_to_tensor,
}


# --- torchvision's transforms, with arguments that are checked before torch is imported ---


class Torchvision(Checked, SampleTransform):
    """Base class of dataclasses whose fields are arguments of the transform `name`; `spelled` maps different names."""

    crops_from: int | None = None
    name: ClassVar[str]
    spelled: ClassVar[Mapping[str, str]] = {"image_size": "size", "count": "num_ops"}

    @cached_property
    def transform(self) -> Any:  # type: ignore[override]
        from torchvision.transforms import InterpolationMode, v2

        kwargs = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        if "interpolation" in kwargs:
            kwargs["interpolation"] = InterpolationMode(kwargs["interpolation"])  # torchvision 0.26 accepts no text
        return getattr(v2, self.name)(**{self.spelled.get(name, name): value for name, value in kwargs.items()})


@dataclass(kw_only=True, eq=False)
class RandomResizedCrop(Torchvision):
    """Crops a random box and resizes it to `image_size` (Szegedy et al. 2015).

    `scale`: the box's fraction of the image; `ratio`: its aspect ratio.
    """

    name = "RandomResizedCrop"
    drawn = "own boxes"
    image_size: Count
    scale: Annotated[Sequence[Fraction], *PAIR] = (0.08, 1.0)
    ratio: Annotated[Sequence[Positive], *PAIR] = (3 / 4, 4 / 3)

    @property
    def crops_from(self) -> int:  # type: ignore[override]
        """At this size the smallest box has `image_size` pixels on its shorter side."""
        low, high = self.ratio
        return math.ceil(self.image_size / math.sqrt(self.scale[0] * min(low, 1 / high)))

    def plan(self, draws: Draws) -> list[list[list[float]]]:
        """Numbers from 0 to 1: for area and ratio of each attempt, then for top and left."""
        return draws.uniform(shape=(ATTEMPTS + 1, 2)).tolist()  # type: ignore[no-any-return]

    def box(self, height: int, width: int, plan: Sequence[Sequence[float]]) -> tuple[int, int, int, int]:
        """Top, left, height and width, distributed as torchvision's."""
        (smallest, largest), (low, high) = self.scale, self.ratio
        *attempts, (top, left) = plan
        for area, turn in attempts:
            pixels = height * width * (smallest + (largest - smallest) * area)
            ratio = low * (high / low) ** turn  # of width to height, uniform in its logarithm
            w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
            if 0 < w <= width and 0 < h <= height:
                return int(top * (height - h + 1)), int(left * (width - w + 1)), h, w
        w, h = min(width, round(height * high)), min(height, round(width / low))  # the centre
        return (height - h) // 2, (width - w) // 2, h, w

    def change(self, sample: Sample, spatial: Sequence[str], plan: Any = None) -> Sample:
        """From a PIL image, copies only the box into a tensor."""
        from torchvision.transforms.v2.functional import resize

        image: Any = sample.get("input")
        if spatial or not is_pillow(image):
            return super().change(sample, spatial, plan)
        top, left, height, width = self.box(image.height, image.width, plan)
        box = tensor_of(image.crop((left, top, left + width, top + height)))
        return {**sample, "input": resize(box, [self.image_size] * 2)}

    def apply(self, sample: Sample, plan: Any) -> Any:
        from torchvision.transforms.v2.functional import resized_crop
        from torchvision.tv_tensors import TVTensor

        height, width = sample["input"].shape[-2:]
        box, size = self.box(height, width, plan), [self.image_size] * 2
        return apply_to_collection(sample, TVTensor, lambda value: resized_crop(value, *box, size))


@dataclass(kw_only=True, eq=False)
class Rotate(Torchvision):
    """Rotates about the centre by up to `degrees` in either direction.

    Uncovered pixels become `fill`, in masks `mask_fill`.
    """

    degrees: Annotated[float, Field(gt=0, le=180)]
    interpolation: Interpolation = "bilinear"
    fill: Byte = 0
    mask_fill: MaskValue = None

    @cached_property
    def transform(self) -> Any:
        from torchvision.transforms import InterpolationMode, v2
        from torchvision.tv_tensors import Mask

        fill = {Mask: self.mask_fill, "others": self.fill}
        return v2.RandomRotation(self.degrees, InterpolationMode(self.interpolation), fill=fill)

    def change(self, sample: Sample, spatial: Sequence[str], plan: Any = None) -> Sample:
        if spatial and self.mask_fill is None:
            raise UnsupportedTransform(
                f"it uncovers pixels, which need a value in `{spatial[0]}`, such as the task's ignore_index: set mask_fill=<value>."
            )
        return super().change(sample, spatial, plan)


@dataclass(kw_only=True, eq=False)
class ColorJitter(Torchvision):
    """Factors from 1 - x to 1 + x, and a rotation of hues by up to `hue` of the circle, in random order."""

    name = "ColorJitter"
    moves = False
    brightness: Amount = 0.0
    contrast: Amount = 0.0
    saturation: Amount = 0.0
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0


@dataclass(kw_only=True, eq=False)
class TrivialAugment(Torchvision):
    """One random operation at a random magnitude (Müller, Hutter 2021). Does not accept masks."""

    name = "TrivialAugmentWide"
    interpolation: Interpolation = "nearest"
    fill: Byte = 0


@dataclass(kw_only=True, eq=False)
class RandAugment(Torchvision):
    """`count` random operations in sequence at one magnitude of 0 to 30 (Cubuk et al. 2020). Does not accept masks."""

    name = "RandAugment"
    count: Count = 2
    magnitude: Annotated[int, Field(ge=0, lt=31)] = 9
    interpolation: Interpolation = "nearest"
    fill: Byte = 0


# --- All operations of a run ---

UNSEEDED = (
    "augment.{0} returns different results for the same seed: it uses a source of random numbers that was not detected or cannot be "
    "seeded, such as os.urandom. Keep its generators in attributes, or remove it: ~augment.{0}."
)


class Augmentation:
    """Applies operations in the order of the mapping, but those at reading first, and those that mix samples last."""

    def __init__(self, operations: Mapping[str, Any]) -> None:
        wrapped = {name: op if isinstance(op, Operation) else SampleTransform(op) for name, op in operations.items()}
        ordered = sorted(wrapped.items(), key=lambda item: (not item[1].at_reading, item[1].mixes))  # a stable sort
        self.operations = dict(ordered)
        self.reads = any(operation.at_reading for operation in wrapped.values())
        self.drawn = ["keyed", *sorted({op.drawn for op in wrapped.values() if op.drawn})]
        self.crops_from = next((op.crops_from for op in wrapped.values() if op.at_reading), None)  # of the first

    def __call__(self, batch: Batch, **kwargs: Any) -> Batch:
        """Applies both parts to samples as they are read. For the arguments see `applied`."""
        return self.on_device(self.at_reading(batch, **kwargs), **kwargs)

    def at_reading(self, batch: Batch, **kwargs: Any) -> Batch:
        return self.applied(batch, True, **kwargs)

    def on_device(self, batch: Batch, **kwargs: Any) -> Batch:
        return self.applied(batch, False, **kwargs)

    def check(self, batch: Batch) -> None:
        """Checks a few samples. Raises UserError if a transform gives a different result with the same seed."""
        for name, operation in self.operations.items():
            if operation.at_reading:
                index_B = batch["index"].numpy()
                first, second = (operation(batch, Draws(f"augment.{name}", index_B, seed=0, epoch=0)) for _ in range(2))
                pairs = zip(leaves_of(first), leaves_of(second), strict=True)
                if not all(a.equal(b) if hasattr(a, "equal") else np.array_equal(a, b) for a, b in pairs):
                    raise UserError(UNSEEDED.format(name))
                batch = first

    def applied(
        self, batch: Batch, at_reading: bool, *, seed: int, epoch: int, repeats: int = 1, index_B: Indices | None = None
    ) -> Batch:
        """Applies the operations that run where samples are read, or the remaining ones.

        `seed`, `epoch`: of the random numbers. `repeats`: so many consecutive samples are copies of one, with different
        random numbers (Hoffer et al., "Augment your batch", 2020). `index_B`: the batch's `index` on the host, because
        reading it from a GPU waits for the GPU.
        """
        index_B = batch["index"].cpu().numpy() if index_B is None else index_B
        options: dict[str, Any] = {"seed": seed, "epoch": epoch, "repeats": repeats, "device": batch["index"].device}
        for name, operation in self.operations.items():
            if operation.at_reading == at_reading:
                batch = operation(batch, Draws(f"augment.{name}", index_B, **options))
        return batch
