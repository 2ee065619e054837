"""Transforms of one sample, from torchvision, timm, albumentations or a project. They run where samples are read.

The loader seeds every generator for each sample: what they draw is a function of (seed, epoch, place in the epoch).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from lightning_utilities.core.apply_func import apply_to_collection
from pydantic import Field

from lockstep import Batch, Indices, UserError, is_pillow
from lockstep.kit.augment.operation import (
    PAIR,
    Byte,
    Checked,
    Count,
    Draws,
    Fraction,
    MaskValue,
    Operation,
    Positive,
    form_of,
)
from lockstep.kit.images import placed
from lockstep.kit.pixels import chw

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Sample = dict[str, Any]  # the values of a batch for one sample: `input` as uint8 (C, H, W), `target`, ...


class SampleTransform:
    """Applies `transform` to a sample.

    Transforms of torchvision.transforms.v2 and of a project get the sample as a dict, with `input` as tv_tensors.Image
    and masks as Mask. Those of albumentations get the image and `masks`, those of timm a PIL image, and those of
    torchvision.transforms a tensor.
    """

    transform: Any

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    @property
    def crops_from(self) -> int | None:
        """The shorter side in pixels that a crop of an image needs, 0: the original; None: it does not always crop."""
        always = getattr(self.transform, "p", 1) == 1
        return 0 if always and "RandomResizedCrop" in type(self.transform).__name__ else None

    @cached_property
    def library(self) -> str:
        """A key of LIBRARIES; "" for a project's own transform."""
        modules = [base.__module__ for base in type(self.transform).__mro__]
        return next((name for name in LIBRARIES if any(module.startswith(name) for module in modules)), "")

    def __call__(self, sample: Sample) -> Sample:
        """Raises UnsupportedTransform if masks or boxes would be lost, or if images are not bytes before and after it."""
        if is_pillow(sample.get("input")):
            sample = {**sample, "input": tensor_of(sample["input"])}
        image, spatial = sample.get("input"), spatial_names(sample)
        if is_image := str(getattr(image, "dtype", "")).endswith("uint8") and image.ndim == 3:  # type: ignore[union-attr]
            sample = {**sample, **wrap_sample(sample, spatial, strict=bool(self.library))}
        elif self.library:
            raise UnsupportedTransform(f"it needs uint8 images (CHW), but `input` is {form_of(image)}.")
        if spatial and LIBRARIES.get(self.library) in (apply_to_tensor, apply_to_pillow):
            raise UnsupportedTransform(f"it moves only the image, not `{spatial[0]}`. Use torchvision.transforms.v2.")
        result = unwrap(LIBRARIES[self.library](self.transform, sample) if self.library else self.transform(sample))
        if is_image and not str(getattr(result["input"], "dtype", "")).endswith("uint8"):
            raise UnsupportedTransform(
                f"it returns {form_of(result['input'])}. Images stay uint8 until they are normalised on the device: remove ToDtype and Normalize."
            )
        return result


def spatial_names(sample: Sample) -> list[str]:
    """The values that have positions in the image."""
    return [name for name, value in sample.items() if name != "input" and placed(value, 1)]


class UnsupportedTransform(Exception):
    """Its message is a sentence about a transform."""


def wrap_sample(sample: Sample, spatial: Sequence[str], *, strict: bool) -> Sample:
    """The image and values with positions in it, as tv_tensors. With `strict`, raises UnsupportedTransform for unknown values."""
    from torchvision.tv_tensors import Image, Mask, TVTensor

    image = sample["input"]

    def wrap(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: wrap(item) if placed(item, 1) else item for key, item in value.items()}
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

    masks = {name: value for name, value in sample.items() if isinstance(value, Mask) and value.ndim == 2}
    if unmoved := {*spatial_names(sample)} - masks.keys():
        raise UnsupportedTransform(
            f"albumentations moves only images and masks (H, W) here, not `{min(unmoved)}`. Use torchvision.transforms.v2."
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


# --- torchvision's transforms that need more than their own arguments; checked before torch is imported ---


@dataclass(kw_only=True, eq=False)
class RandomResizedCrop(Checked, SampleTransform):
    """Crops a random box and resizes it to `image_size` (Szegedy et al. 2015).

    `scale`: the box's fraction of the image; `ratio`: its aspect ratio.
    """

    image_size: Count
    scale: Annotated[Sequence[Fraction], *PAIR] = (0.08, 1.0)
    ratio: Annotated[Sequence[Positive], *PAIR] = (3 / 4, 4 / 3)

    @cached_property
    def transform(self) -> Any:  # type: ignore[override]
        from torchvision.transforms import v2

        return v2.RandomResizedCrop(self.image_size, self.scale, self.ratio)

    @property
    def crops_from(self) -> int:  # type: ignore[override]
        """At this size the smallest box has `image_size` pixels on its shorter side."""
        low, high = self.ratio
        return math.ceil(self.image_size / math.sqrt(self.scale[0] * min(low, 1 / high)))

    def __call__(self, sample: Sample) -> Sample:
        """From a PIL image, copies only the box into a tensor."""
        from torchvision.transforms.v2.functional import resize

        image: Any = sample.get("input")
        if not is_pillow(image) or spatial_names(sample):
            return super().__call__(sample)
        box = self.transform.make_params([image])
        right, bottom = box["left"] + box["width"], box["top"] + box["height"]
        inside = tensor_of(image.crop((box["left"], box["top"], right, bottom)))
        return {**sample, "input": resize(inside, [self.image_size] * 2)}


@dataclass(kw_only=True, eq=False)
class Rotate(Checked, SampleTransform):
    """Rotates about the centre by up to `degrees` in either direction.

    Uncovered pixels become `fill`, in masks `mask_fill`.
    """

    degrees: Annotated[float, Field(gt=0, le=180)]
    interpolation: Literal["nearest", "bilinear"] = "bilinear"
    fill: Byte = 0
    mask_fill: MaskValue = None

    @cached_property
    def transform(self) -> Any:  # type: ignore[override]
        from torchvision.transforms import InterpolationMode, v2
        from torchvision.tv_tensors import Mask

        fill = {Mask: self.mask_fill, "others": self.fill}
        return v2.RandomRotation(self.degrees, InterpolationMode(self.interpolation), fill=fill)

    def __call__(self, sample: Sample) -> Sample:
        if self.mask_fill is None and (names := spatial_names(sample)):
            raise UnsupportedTransform(
                f"it uncovers pixels, which need a value in `{names[0]}`, such as the task's ignore_index: set mask_fill=<value>."
            )
        return super().__call__(sample)


# --- All operations of a run ---


class Augmentation:
    """Transforms samples where they are read, and applies operations to batches: those that mix samples run last."""

    def __init__(self, operations: Mapping[str, Any]) -> None:
        on_device = {name: op for name, op in operations.items() if isinstance(op, Operation)}
        self.operations = dict(sorted(on_device.items(), key=lambda item: item[1].mixes))  # a stable sort
        others = {name: op for name, op in operations.items() if name not in on_device}
        self.transforms = {
            n: op if isinstance(op, SampleTransform) else SampleTransform(op) for n, op in others.items()
        }
        self.crops_from = next((op.crops_from for op in self.transforms.values()), None)  # of the first

    def at_reading(self, batch: Batch) -> Batch:
        """Changes a sample, a batch of one. Raises UserError if a library's transform fails."""
        import torch

        # copies, because a transform may write to its input
        values = apply_to_collection({n: v for n, v in batch.items() if n != "index"}, torch.Tensor, torch.Tensor.clone)
        sample = apply_to_one(lambda value: value[0], values)
        for name, transform in self.transforms.items():
            location = f"augment.{name}, sample {int(batch['index'][0])}"
            try:
                sample = transform(sample)
            except UnsupportedTransform as e:
                raise UserError(f"{location}: {e} Or remove it: ~augment.{name}.") from None
            except Exception as e:
                if not type(transform.transform).__module__.startswith((*LIBRARIES,)):
                    e.add_note(f"in {location}")
                    raise
                raise UserError(f"{location}: {type(e).__name__}: {e}. Fix it, or remove it: ~augment.{name}.") from e
        lists = {n: [v] for n, v in sample.items() if isinstance(values.get(n), list) and n != "input"}
        return {"index": batch["index"], **apply_to_one(with_batch_dimension, sample), **lists}

    def on_device(self, batch: Batch, place_B: Indices, *, seed: int, epoch: int, repeats: int = 1) -> Batch:
        """Changes a batch on its device. `place_B`: places in the epoch, from which the random numbers are derived.

        `repeats`: so many consecutive samples are copies of one, with different random numbers (Hoffer et al., "Augment
        your batch", 2020).
        """
        options: dict[str, Any] = {"seed": seed, "epoch": epoch, "repeats": repeats, "device": batch["index"].device}
        for name, operation in self.operations.items():
            batch = operation(batch, Draws(f"augment.{name}", place_B, **options))
        return batch


def apply_to_one(change: Callable[[Any], Any], values: Mapping[str, Any]) -> Sample:
    """Changes each value of a sample or batch, also those in dicts."""
    return {n: apply_to_one(change, v) if isinstance(v, Mapping) else change(v) for n, v in values.items()}


def with_batch_dimension(value: Any) -> Any:
    import torch

    if isinstance(value, int | float):
        return torch.as_tensor([value])
    return value[None] if type(value) is torch.Tensor else [value]
