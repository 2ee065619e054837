"""What lies on images: masks, boxes and keypoints, and how they move with them. Free of torch until something moves."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.data.dataset import Batch, is_pillow
from lockstep.data.pixels import Frame, Size, original_size, resize_nearest, to_array, upright
from lockstep.errors import UserError

# H W pixel

STAY = "images of {} x {} pixels are cropped or padded (data.resize={}, data.crop_pct={:g}), and `{}` would not move with them. Set data.resize=squash data.crop_pct=1, or return images of data.image_size."


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


def lies_on(value: Any, shape: Sequence[int]) -> bool:
    """Whether all places in it are those of an image of `shape` (H, W): of masks, of torchvision's boxes and keypoints."""
    if isinstance(value, Mapping | list | tuple):
        inner = value.values() if isinstance(value, Mapping) else value
        return all(lies_on(each, shape) for each in inner if has_places(each, 1))
    return tuple(getattr(value, "canvas_size", None) or value.shape[-2:]) == tuple(shape)


def has_masks(value: Any) -> bool:
    """Nobody knows the class of what is padded."""
    inner = value.values() if isinstance(value, Mapping) else ()
    return any(map(has_masks, inner)) if inner else has_places(value, 1) and not hasattr(value, "canvas_size")


def moved(value: Any, frame: Frame, shape: Size) -> Any:
    """What lies on an image of `shape`, in its square."""
    if isinstance(value, Mapping):
        return {name: moved(each, frame, shape) if has_places(each, 1) else each for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [moved(each, frame, shape) for each in value]
    import torch
    from torchvision.transforms.v2 import functional as F

    if not hasattr(value, "canvas_size"):
        return frame.tensor(torch.as_tensor(value), resize_nearest)
    size, corner = frame.fitted(*shape)
    return F.crop(F.resize(value, [*size]), *corner, frame.size, frame.size)


def in_frame(values: dict[str, Any], *, channels: int, frame: Frame, least: int | None = None) -> dict[str, Any]:
    """A sample with a PIL image as `input`, and PIL images as masks: with bytes, in the image's frame; with `least`, with the whole image.

    Raises:
        UserError: something else belongs to places in the image, or masks would be padded.
    """
    image = values["input"]
    values = {name: np.array(v) if name != "input" and is_pillow(v) else v for name, v in values.items()}
    places = {name: value for name, value in values.items() if name != "input" and has_places(value, 1)}
    if least is not None:  # a JPEG that scales itself would leave its masks
        return {**values, "input": upright(image, channels=channels, least=0 if places else least)}
    width, height = original_size(image)
    made = {**values, "input": to_array(image, channels=channels, frame=frame)}
    _, corner = frame.fitted(height, width)
    for name, value in places.items():
        if lies_on(value, (height, width)) and (min(corner) >= 0 or not has_masks(value)):
            made[name] = moved(value, frame, (height, width))
        elif any(corner):
            raise UserError(STAY.format(width, height, frame.resize, frame.crop_pct, name))
    return made
