"""Transforms of one sample: torchvision's, timm's, albumentations' and the project's own. They run where samples are read.

Every random number that they draw, by whatever generator, is a function of (seed, epoch, sample, copy, name of the transform).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from lightning_utilities.core.apply_func import apply_to_collection
from pydantic import Field

from lockstep.augment.operation import (
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
from lockstep.augment.transforms import ATTEMPTS
from lockstep.data.dataset import Batch, is_pillow
from lockstep.data.pixels import chw
from lockstep.data.places import has_places
from lockstep.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from lockstep.data.keyed import Generators

Sample = dict[str, Any]  # the values of a batch for one sample: `input` as uint8 (C, H, W), `target`, ...
Interpolation = Literal["nearest", "bilinear"]


class SampleTransform(Operation):
    """Applies `transform` to each sample of a batch.

    torchvision.transforms.v2's and the project's own get the sample as a dict, with `input` as tv_tensors.Image and masks as Mask;
    albumentations' the image and `masks`; timm's a PIL image, and torchvision.transforms' a tensor.
    """

    at_reading = True
    moves: ClassVar[bool] = True  # whether it may move pixels
    transform: Any

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    @cached_property
    def generators(self) -> "Generators":
        from lockstep.data.keyed import Generators

        return Generators(self.transform)

    @property
    def crops_from(self) -> int | None:  # type: ignore[override]
        """Also for timm's and albumentations', if they always crop."""
        always = getattr(self.transform, "p", 1) == 1
        return 0 if always and "RandomResizedCrop" in type(self.transform).__name__ else None

    @cached_property
    def library(self) -> str:
        """Of LIBRARIES; "" for the project's own."""
        homes = [base.__module__ for base in type(self.transform).__mro__]
        return next((name for name in LIBRARIES if any(home.startswith(name) for home in homes)), "")

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        own = {name: value for name, value in batch.items() if name not in ("index", "count")}
        places = [name for name, value in own.items() if name != "input" and has_places(value)] if self.moves else []

        plan_B = self.plan(draws)

        def change(place: int) -> Sample:
            where, plan = f"{draws.name}, sample {batch['index'][place]}", None if plan_B is None else plan_B[place]
            try:
                # a copy, because a transform of a library may write to what it gets
                sample = {name: one_of(value, place, copied=plan is None) for name, value in own.items()}
                return self.change(sample, places, plan)
            except CannotMove as e:
                raise UserError(f"{where}: {e} Or remove it: ~{draws.name}.") from None
            except Exception as e:
                if not type(self.transform).__module__.startswith((*LIBRARIES,)):
                    e.add_note(f"in {where}")
                    raise
                raise UserError(f"{where}: {type(e).__name__}: {e}. Repair it, or remove it: ~{draws.name}.") from e

        if plan_B is None:
            changed = self.generators.each(len(draws.state_B), lambda: draws.state_B, change)
        else:
            changed = [change(place) for place in range(len(plan_B))]
        lists = [name for name, value in own.items() if isinstance(value, list) and name != "input"]
        values = {name: [sample[name] for sample in changed] for name in changed[0]}
        return {**batch, **{name: each if name in lists else joined(each) for name, each in values.items()}}

    def plan(self, draws: Draws) -> Sequence[Any] | None:
        """What the draws decide for each sample; None if generators decide, which take longer to seed."""
        return None

    def apply(self, sample: Sample, plan: Any) -> Any:
        return LIBRARIES[self.library](self.transform, sample) if self.library else self.transform(sample)

    def change(self, sample: Sample, places: Sequence[str], plan: Any = None) -> Sample:
        """Raises CannotMove: it would lose masks or boxes, or images are not bytes before or after it."""
        if is_pillow(sample.get("input")):
            sample = {**sample, "input": tensor_of(sample["input"])}
        image = sample.get("input")
        if is_image := str(getattr(image, "dtype", "")).endswith("uint8") and image.ndim == 3:  # type: ignore[union-attr]
            sample = {**sample, **wrapped(sample, places, strict=bool(self.library))}
        elif self.library:
            raise CannotMove(f"it changes images of bytes (uint8, CHW), and `input` is {form_of(image)}.")
        if places and LIBRARIES.get(self.library) in (of_tensor, of_pillow):
            raise CannotMove(f"it gets the image alone, and `{places[0]}` would stay. Use torchvision.transforms.v2.")
        result = plain(self.apply(sample, plan))
        if is_image and not str(getattr(result["input"], "dtype", "")).endswith("uint8"):
            raise CannotMove(
                f"it returns {form_of(result['input'])}. Images stay bytes until the device normalises them: leave ToDtype and Normalize out."
            )
        return result


class CannotMove(Exception):
    """A sentence about a transform."""


def form_of(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return f"{str(getattr(value, 'dtype', type(value).__name__)).removeprefix('torch.')}{shape}"


def one_of(value: Any, place: int, *, copied: bool) -> Any:
    """What a batch holds for one sample."""
    if isinstance(value, Mapping):
        return {name: one_of(each, place, copied=copied) for name, each in value.items()}
    import torch

    return apply_to_collection(value[place], torch.Tensor, torch.Tensor.clone) if copied else value[place]


def joined(values: list[Any]) -> Any:
    """A tensor of all samples where they have one shape, else a list."""
    import torch

    first = values[0]
    if isinstance(first, int | float):
        return torch.as_tensor(values)
    if isinstance(first, dict):
        return {name: joined([each[name] for each in values]) for name in first}
    alike = all(type(each) is torch.Tensor and each.shape == first.shape for each in values)
    return torch.stack(values) if alike else values


def wrapped(sample: Sample, places: Sequence[str], *, strict: bool) -> Sample:
    """The image, and what refers to places in it, as tv_tensors. Raises CannotMove: `strict`, and it is not known what it is."""
    from torchvision.tv_tensors import Image, Mask, TVTensor

    image = sample["input"]

    def one(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: one(each) if has_places(each, 1) else each for key, each in value.items()}
        if isinstance(value, TVTensor) or getattr(value, "shape", ())[-2:] == image.shape[-2:]:
            return value if isinstance(value, TVTensor) else Mask(value)
        if strict:
            raise CannotMove(
                f"it cannot move {form_of(value)}. Let the data set return tv_tensors.BoundingBoxes, KeyPoints or Mask."
            )
        return value

    return {"input": Image(image), **{name: one(sample[name]) for name in places}}


def plain(value: Any) -> Any:
    """A tensor in place of an array, an image or a mask. Boxes and keypoints stay what they are."""
    import torch
    from torchvision.tv_tensors import Image, Mask

    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, Image | Mask):
        return value.as_subclass(torch.Tensor)
    return torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value


def tensor_of(image: "Image") -> "Tensor":
    """image_CHW, in memory as HWC, which torch resizes three times as fast."""
    import torch

    return torch.from_numpy(chw(image))


def hwc(image_CHW: Any) -> Any:
    return np.ascontiguousarray(image_CHW.numpy().transpose(1, 2, 0))


# --- What the transforms of a library get ---


def of_tensor(transform: Any, sample: Sample) -> Sample:
    return {**sample, "input": transform(plain(sample["input"]))}


def of_pillow(transform: Any, sample: Sample) -> Sample:
    from PIL import Image

    array_HWC = hwc(sample["input"])
    image = transform(Image.fromarray(array_HWC[..., 0] if array_HWC.shape[2] == 1 else array_HWC))
    return {**sample, "input": chw(image) if isinstance(image, Image.Image) else image}


def of_albumentations(transform: Any, sample: Sample) -> Sample:
    import torch
    from torchvision.tv_tensors import Mask

    masks = {name: value for name, value in sample.items() if isinstance(value, Mask)}
    if others := [
        name for name, value in sample.items() if name not in masks and has_places(value, 1) and name != "input"
    ]:
        raise CannotMove(
            f"albumentations moves masks alone here, and `{others[0]}` would stay. Use torchvision.transforms.v2."
        )
    if deep := [name for name, value in masks.items() if value.ndim != 2]:
        raise CannotMove(
            f"`{deep[0]}` is {form_of(masks[deep[0]])}, and albumentations takes masks (H, W). Use torchvision.transforms.v2."
        )
    arrays = [value.to(torch.uint8 if value.dtype == torch.bool else value.dtype).numpy() for value in masks.values()]
    made = transform(image=hwc(sample["input"]), **({"masks": arrays} if masks else {}))
    moved = {
        n: torch.from_numpy(np.array(a)).to(masks[n].dtype) for n, a in zip(masks, made.get("masks", ()), strict=True)
    }
    return {**sample, **moved, "input": chw(made["image"])}


LIBRARIES: Mapping[str, Callable[[Any, Sample], Sample]] = {
    "albumentations.": of_albumentations,
    "timm.data.random_erasing": of_tensor,
    "timm.": of_pillow,
    "torchvision.transforms.v2": lambda transform, sample: dict(transform(sample)),
    "torchvision.": of_tensor,
}


# --- torchvision's, with arguments that are checked before torch is imported ---


class Torchvision(Checked, SampleTransform):
    """Base class of dataclasses whose fields are arguments of the transform `name`, there `spelled` in another way."""

    crops_from: int | None = None
    name: ClassVar[str]
    spelled: ClassVar[Mapping[str, str]] = {"image_size": "size", "count": "num_ops"}

    @cached_property
    def transform(self) -> Any:  # type: ignore[override]
        from torchvision.transforms import InterpolationMode, v2

        given = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        if "interpolation" in given:
            given["interpolation"] = InterpolationMode(given["interpolation"])  # torchvision 0.26 takes no text
        return getattr(v2, self.name)(**{self.spelled.get(name, name): value for name, value in given.items()})


@dataclass(kw_only=True, eq=False)
class RandomResizedCrop(Torchvision):
    """A box of a fraction of the image (`scale`) and an aspect ratio (`ratio`), resized to `image_size` (Szegedy et al. 2015)."""

    name = "RandomResizedCrop"
    drawn = "own boxes"
    image_size: Count
    scale: Annotated[Sequence[Fraction], *PAIR] = (0.08, 1.0)
    ratio: Annotated[Sequence[Positive], *PAIR] = (3 / 4, 4 / 3)

    @property
    def crops_from(self) -> int:  # type: ignore[override]
        """The smallest box then has `image_size` pixels on its shorter side."""
        low, high = self.ratio
        return math.ceil(self.image_size / math.sqrt(self.scale[0] * min(low, 1 / high)))

    def plan(self, draws: Draws) -> list[list[list[float]]]:
        """Numbers from 0 to 1: of area and ratio for each attempt, then of top and left."""
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
        w, h = min(width, round(height * high)), min(height, round(width / low))  # the middle
        return (height - h) // 2, (width - w) // 2, h, w

    def change(self, sample: Sample, places: Sequence[str], plan: Any = None) -> Sample:
        """Of a whole picture, copies the box alone into a tensor."""
        from torchvision.transforms.v2.functional import resize

        image: Any = sample.get("input")
        if places or not is_pillow(image):
            return super().change(sample, places, plan)
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
    """Rotates about the centre by up to `degrees` in either direction; uncovered pixels become `fill`, in masks `mask_fill`."""

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

    def change(self, sample: Sample, places: Sequence[str], plan: Any = None) -> Sample:
        if places and self.mask_fill is None:
            raise CannotMove(
                f"it uncovers pixels, and `{places[0]}` needs a value for them, such as the task's ignore_index: mask_fill=<value>."
            )
        return super().change(sample, places, plan)


@dataclass(kw_only=True, eq=False)
class ColorJitter(Torchvision):
    """Factors from 1 - x to 1 + x, and a turn of the hues by up to `hue` of the circle, in random order."""

    name = "ColorJitter"
    moves = False
    brightness: Amount = 0.0
    contrast: Amount = 0.0
    saturation: Amount = 0.0
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0


@dataclass(kw_only=True, eq=False)
class TrivialAugment(Torchvision):
    """One random operation at a random magnitude (Müller, Hutter 2021). Takes no masks."""

    name = "TrivialAugmentWide"
    interpolation: Interpolation = "nearest"
    fill: Byte = 0


@dataclass(kw_only=True, eq=False)
class RandAugment(Torchvision):
    """`count` random operations one after another at one magnitude of 0 to 30 (Cubuk et al. 2020). Takes no masks."""

    name = "RandAugment"
    count: Count = 2
    magnitude: Annotated[int, Field(ge=0, lt=31)] = 9
    interpolation: Interpolation = "nearest"
    fill: Byte = 0
