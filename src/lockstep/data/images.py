"""Data sets of images: bytes until they are on the device, then resized and normalised in batches."""

# B batch · C channel · H W pixel

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.data.dataset import Batch, DataSet
from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.data.transforms import Preprocess

Normalisation = tuple[Sequence[float], Sequence[float]]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GREY_MEAN, GREY_STD = (0.449,), (0.226,)  # the means of ImageNet's three channels


class Images(DataSet):
    """Images as `input`: uint8, BCHW, of any size. `channels`, of classes that decode images: 3 for RGB, 1 for grey.

    `mean` and `std` are one number per channel. `build` replaces `model` by the values the network was pretrained with, or
    by those of this class.
    """

    unit = "images"
    mean: ClassVar[Sequence[float]] = IMAGENET_MEAN
    std: ClassVar[Sequence[float]] = IMAGENET_STD
    classes: Sequence[str] = ()

    def __init__(
        self,
        *,
        image_size: int,
        channels: int | None = None,
        mean: str | Sequence[float] = "model",
        std: str | Sequence[float] = "model",
        channels_last: bool = True,
    ) -> None:
        self.image_size, self.channels_last = image_size, channels_last
        own_mean, own_std = self.normalisation({"channels": channels})
        self.pixel_mean = list(own_mean if isinstance(mean, str) else mean)
        self.pixel_std = list(own_std if isinstance(std, str) else std)

    @classmethod
    def normalisation(cls, data: Mapping[str, Any]) -> Normalisation:
        """Mean and std of the images of a `data` node, used if the network was not pretrained with its own."""
        grey = data.get("channels") == 1 and cls.mean is IMAGENET_MEAN  # of a class that names no other mean
        return (GREY_MEAN, GREY_STD) if grey else (cls.mean, cls.std)

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        channels, std = len(cls.normalisation(data)[0]), data.get("std")
        if data.get("channels") not in (None, channels):
            yield f"data.channels={data['channels']} has no effect: these images have {channels}. Leave it out."
        for key in ("mean", "std"):
            value = data.get(key)
            if isinstance(value, list) and len(value) != channels:
                yield f"data.{key}={value} has {len(value)} numbers; these images have {channels} channels. Give one number per channel."
        if isinstance(std, list) and not all(s > 0 for s in std):
            yield f"data.std={std} must be above 0."

    @property
    def channels(self) -> int:
        return len(self.pixel_mean)

    @cached_property
    def about(self) -> dict[str, Any]:
        return {
            "channels": self.channels,
            "image_size": self.image_size,
            "classes": list(self.classes),
            "mean": self.pixel_mean,
            "std": self.pixel_std,
        }

    def network_arguments(self) -> dict[str, Any]:
        return {"in_channels": self.channels, "image_size": self.image_size}

    @cached_property
    def preprocessing(self) -> "Preprocess":
        from lockstep.data.transforms import Preprocess

        numbers = {"mean": self.pixel_mean, "std": self.pixel_std}
        return Preprocess(image_size=self.image_size, channels_last=self.channels_last, **numbers)

    def preprocess(self, batch: Batch) -> Batch:
        image_BCHW = batch["input"]
        if image_BCHW.shape[1] != self.channels:
            raise UserError(
                f"the images have {image_BCHW.shape[1]} channels, and data.mean and data.std {self.channels} numbers. Give one for each channel."
            )
        if image_BCHW.shape[-2:] != (self.image_size, self.image_size):
            from lockstep.data.transforms import nearest

            masks = {name: v for name, v in spatial(batch).items() if v.shape[-2:] == image_BCHW.shape[-2:]}
            batch = {**batch, **{name: nearest(value, self.image_size) for name, value in masks.items()}}
        return {**batch, "input": self.preprocessing(image_BCHW)}


def spatial(batch: Batch) -> Batch:
    """Batch values that may refer to places in the images: masks, boxes, keypoints."""
    return {name: value for name, value in batch.items() if name != "input" and getattr(value, "ndim", 0) > 2}
