"""What lies on images: masks, boxes and keypoints, and how they move with them. Free of torch until something moves."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.data.dataset import Batch, is_pillow
from lockstep.data.pixels import Frame, Size, original_size, resize_nearest, to_array, upright
from lockstep.errors import UserError

# H W pixel

STAY = "images of {} x {} pixels are cropped or padded (data.resize={}, data.crop_pct={:g}), and `{}` would not move with them. Let the data set return masks of the images' size, boxes and keypoints as tv_tensors, or images of data.image_size; masks cannot be padded."


def spatial(batch: Batch, *, nested: bool = False) -> Batch:
    """Batch values that may refer to places in the images: masks, boxes, keypoints; with `nested`, also dicts and lists of them."""
    values = {name: value for name, value in batch.items() if name != "input" and (nested or hasattr(value, "ndim"))}
    return {name: value for name, value in values.items() if has_places(value)}


def has_places(value: Any, sizes: int = 2) -> bool:
    """Whether something in it has more dimensions than sample and number; a list with one entry for each sample stands for the first."""
    if isinstance(value, Mapping):
        return any(has_places(each, sizes) for each in value.values())
    if isinstance(value, list | tuple):
        return any(has_places(each, sizes - 1) for each in value)
    return bool(getattr(value, "ndim", 0) > sizes)


def inner(value: Any, sizes: int) -> list[tuple[Any, int]]:
    """What a dict or a list holds that refers to places, each with the `sizes` of `has_places`; the value itself, if it is neither."""
    if isinstance(value, Mapping):
        return [pair for each in value.values() if has_places(each, sizes) for pair in inner(each, sizes)]
    if isinstance(value, list | tuple):
        return [pair for each in value if has_places(each, sizes - 1) for pair in inner(each, sizes - 1)]
    return [(value, sizes)]


def is_on(value: Any, shape: Sequence[int]) -> bool:
    """Whether a mask, torchvision's boxes or keypoints lie on an image of `shape` (H, W)."""
    return tuple(getattr(value, "canvas_size", None) or value.shape[-2:]) == tuple(shape)


def lies_on(value: Any, shape: Sequence[int]) -> bool:
    """Whether all places in a value of a batch are those of an image of `shape`."""
    return all(is_on(each, shape) for each, _ in inner(value, 2))


def moved(value: Any, frame: Frame, shape: Size, sizes: int) -> Any:
    """What lies on an image of `shape`, in its square; other values as they are."""
    if isinstance(value, Mapping):
        return {name: moved(each, frame, shape, sizes) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [moved(each, frame, shape, sizes - 1) for each in value]
    if not has_places(value, sizes) or not is_on(value, shape):
        return value
    import torch
    from torchvision.transforms.v2 import functional as F

    if not hasattr(value, "canvas_size"):
        return frame.tensor(torch.as_tensor(value), resize_nearest)
    size, corner = frame.fitted(*shape)
    return F.crop(F.resize(value, [*size]), *corner, frame.size, frame.size)


def all_moved(values: Batch, frame: Frame, shape: Size, sizes: int) -> Batch:
    """Values of a batch (`sizes` 2) or a sample (1), of which those that lie on images of `shape` move with them into the frame.

    Raises:
        UserError: something else belongs to places in images that are cropped or padded, or masks would be padded.
    """
    places = {name: value for name, value in values.items() if name != "input" and has_places(value, sizes)}
    _, corner = frame.fitted(*shape)
    for name, value in places.items() if any(corner) else ():
        # nobody knows the class of what is padded
        fits = (
            is_on(each, shape) and (min(corner) >= 0 or hasattr(each, "canvas_size")) for each, _ in inner(value, sizes)
        )
        if not all(fits):
            raise UserError(STAY.format(shape[1], shape[0], frame.resize, frame.crop_pct, name))
    return {**values, **{name: moved(value, frame, shape, sizes) for name, value in places.items()}}


def in_frame(values: dict[str, Any], *, channels: int, frame: Frame, least: int | None = None) -> dict[str, Any]:
    """A sample with a PIL image as `input`, and PIL images as masks: with bytes, in the image's frame; with `least`, with the whole image.

    Raises UserError: see `all_moved`.
    """
    image = values["input"]
    masks = {n: np.array(v) for n, v in values.items() if n != "input" and is_pillow(v) and len(v.getbands()) == 1}
    values = {**values, **masks}
    if least is not None:  # a JPEG that scales itself would leave its masks
        has_any = any(has_places(value, 1) for name, value in values.items() if name != "input")
        return {**values, "input": upright(image, channels=channels, least=0 if has_any else least)}
    width, height = original_size(image)
    return {**all_moved(values, frame, (height, width), 1), "input": to_array(image, channels=channels, frame=frame)}
