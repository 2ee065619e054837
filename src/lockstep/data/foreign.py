"""Data that another library holds, as samples or rows: images, or anything else. Free of torch."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.config.words import shown
from lockstep.data.dataset import Batch
from lockstep.data.images import Images
from lockstep.errors import UserError

IMAGE_SIZE = 224


class Foreign(Images):
    """Images get the treatment of images: resized to `image_size` where they are decoded, normalised on the device.

    Anything else goes to the network unchanged. The first training sample decides which it is. A subclass sets `train`,
    `val` and `test` to Samples, and `names` to what describes its targets: `classes`, `targets`, ...
    """

    names: Mapping[str, Sequence[str]]

    def __init__(self, *, image_size: int = IMAGE_SIZE, **images: Any) -> None:
        super().__init__(image_size=image_size, **images)

    @cached_property
    def first(self) -> NDArray[Any]:
        return np.asarray(self.train[np.array([0])]["input"])[0]

    def prepare(self) -> None:
        """Raises UserError for image options if the samples are not images."""
        usual = {"image_size": IMAGE_SIZE, "channels": 3}
        own = {name: getattr(self, name) for name in usual}
        given = [f"data.{name}={shown(value)}" for name, value in own.items() if value != usual[name]]
        if given and not self.holds_images:
            raise UserError(
                f"{' and '.join(given)} without effect: `input` is {self.first.dtype} of shape {self.first.shape}, no image of bytes (uint8, CHW). Leave it out."
            )

    @property
    def holds_images(self) -> bool:
        return self.first.dtype == np.uint8 and self.first.ndim == 3

    @property
    def unit(self) -> str:  # type: ignore[override]
        return "images" if self.holds_images else "samples"

    @cached_property
    def about(self) -> dict[str, Any]:
        images = super().about if self.holds_images else {}
        return {**images, **{name: list(values) for name, values in self.names.items()}}

    def network_arguments(self) -> dict[str, Any]:
        if self.holds_images:
            return super().network_arguments()
        shape = self.first.shape
        if len(shape) == 3:
            return {"in_channels": shape[0], "image_size": shape[-1]}
        return {"in_features": shape[0]} if len(shape) == 1 else {}

    def preprocess(self, batch: Batch) -> Batch:
        return super().preprocess(batch) if self.holds_images else batch
