"""Resizes and crops masks, boxes and keypoints along with their images. Imports torch only when needed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep import Batch, UserError, is_pillow
from lockstep.kit.pixels import Frame, Size, original_size, resize_nearest, to_array, upright

# H W pixel

STAY = "images of {} x {} pixels are cropped or padded (data.resize={}, data.crop_pct={:g}), but `{}` would not move with them. Return masks of the images' size, boxes and keypoints as tv_tensors, or images of data.image_size. Masks cannot be padded."


def spatial(batch: Batch, *, nested: bool = False) -> Batch:
    """Batch values that may have image coordinates: masks, boxes, keypoints. `nested`: also dicts and lists of them."""
    values = {name: value for name, value in batch.items() if name != "input" and (nested or hasattr(value, "ndim"))}
    return {name: value for name, value in values.items() if has_places(value)}


def has_places(value: Any, sizes: int = 2) -> bool:
    """Whether a value has image coordinates: more than `sizes` dimensions. A list counts as the first dimension."""
    if isinstance(value, Mapping):
        return any(has_places(item, sizes) for item in value.values())
    if isinstance(value, list | tuple):
        return any(has_places(item, sizes - 1) for item in value)
    return bool(getattr(value, "ndim", 0) > sizes)


def nested_values(value: Any, sizes: int) -> list[tuple[Any, int]]:
    """The values with image coordinates in a dict or list, each with its `sizes` for `has_places`; or the value."""
    if isinstance(value, Mapping):
        return [pair for item in value.values() if has_places(item, sizes) for pair in nested_values(item, sizes)]
    if isinstance(value, list | tuple):
        return [pair for item in value if has_places(item, sizes - 1) for pair in nested_values(item, sizes - 1)]
    return [(value, sizes)]


def matches_image(value: Any, shape: Sequence[int]) -> bool:
    """Whether a mask, or torchvision's boxes or keypoints, match an image of `shape` (H, W)."""
    return tuple(getattr(value, "canvas_size", None) or value.shape[-2:]) == tuple(shape)


def all_match_image(value: Any, shape: Sequence[int]) -> bool:
    """Whether everything in a value of a batch belongs to images of `shape`."""
    return all(matches_image(item, shape) for item, _ in nested_values(value, 2))


def move_into_frame(value: Any, frame: Frame, shape: Size, sizes: int) -> Any:
    """Moves values that belong to an image of `shape` into its frame; returns other values unchanged."""
    if isinstance(value, Mapping):
        return {name: move_into_frame(item, frame, shape, sizes) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [move_into_frame(item, frame, shape, sizes - 1) for item in value]
    if not has_places(value, sizes) or not matches_image(value, shape):
        return value
    import torch
    from torchvision.transforms.v2 import functional as F

    if not hasattr(value, "canvas_size"):
        return frame.tensor(torch.as_tensor(value), resize_nearest)
    size, corner = frame.fitted(*shape)
    return F.crop(F.resize(value, [*size]), *corner, frame.size, frame.size)


def move_all_into_frame(values: Batch, frame: Frame, shape: Size, sizes: int) -> Batch:
    """Moves the values of a batch (`sizes` 2) or a sample (1) that belong to images of `shape` into the frame.

    Raises:
        UserError: images are cropped or padded, and other values have image coordinates, or masks would be padded.
    """
    spatial_values = {name: value for name, value in values.items() if name != "input" and has_places(value, sizes)}
    _, corner = frame.fitted(*shape)
    for name, value in spatial_values.items() if any(corner) else ():
        # the class of padded pixels is undefined
        items, is_padded = [item for item, _ in nested_values(value, sizes)], min(corner) < 0
        if not all(matches_image(item, shape) and (hasattr(item, "canvas_size") or not is_padded) for item in items):
            raise UserError(STAY.format(shape[1], shape[0], frame.resize, frame.crop_pct, name))
    return {**values, **{name: move_into_frame(value, frame, shape, sizes) for name, value in spatial_values.items()}}


def in_frame(values: dict[str, Any], *, channels: int, frame: Frame, least: int | None = None) -> dict[str, Any]:
    """Converts a sample whose `input` and masks are PIL images to arrays in the frame. `least`: keeps the whole image.

    Raises UserError: see `move_all_into_frame`.
    """
    image = values["input"]
    masks = {n: np.array(v) for n, v in values.items() if n != "input" and is_pillow(v) and len(v.getbands()) == 1}
    values = {**values, **masks}
    if least is not None:  # a JPEG decoded at a reduced size would no longer match its masks
        has_masks = any(has_places(value, 1) for name, value in values.items() if name != "input")
        return {**values, "input": upright(image, channels=channels, least=0 if has_masks else least)}
    width, height = original_size(image)
    moved = move_all_into_frame(values, frame, (height, width), 1)
    return {**moved, "input": to_array(image, channels=channels, frame=frame)}
