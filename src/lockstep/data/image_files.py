"""Image files without a data set around them, prepared as the images that a network was trained on. Free of torch."""

# B batch · N file

import hashlib
import os
import warnings
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from lockstep.data.images import Images
from lockstep.data.inputs import Inputs
from lockstep.data.samples import Indices
from lockstep.errors import UserError

NEEDED = ("image_size", "channels", "mean", "std")  # in the `about` of the training data


class Readable:
    """Image files, decoded when they are read. `problem` says why a file could not be read: its image is then black."""

    def __init__(self, inputs: Inputs, *, channels: int, size: int) -> None:
        # Arrays of bytes, because reference counts make workers copy a list of strings page by page.
        self.base, self.names_N = inputs.base, as_bytes(inputs.names)
        self.targets_N = None if inputs.targets is None else as_bytes(inputs.targets)
        self.channels, self.size = channels, size

    def __len__(self) -> int:
        return len(self.names_N)

    def __getitem__(self, indices: Indices) -> dict[str, Any]:
        from PIL import Image

        from lockstep.data.pixels import to_array

        image_BCHW = np.zeros((len(indices), self.channels, self.size, self.size), np.uint8)
        problems = [""] * len(indices)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd EXIF data and palettes
            for place, index in enumerate(indices):
                try:
                    with Image.open(self.base / self.name(index)) as image:
                        image_BCHW[place] = to_array(image, channels=self.channels, size=self.size)
                except Exception as e:  # Pillow raises nearly anything for a broken file
                    problems[place] = " ".join(str(e).split()) or type(e).__name__
        return {"input": image_BCHW, "problem": problems}

    def original_size(self, index: int) -> tuple[int, int]:
        """Width and height of a file, from its header."""
        from PIL import Image

        from lockstep.data.pixels import original_size

        with Image.open(self.base / self.name(index)) as image:
            return original_size(image)

    def name(self, index: int) -> str:
        return os.fsdecode(self.names_N[index])

    def target(self, index: int) -> str | None:
        return None if self.targets_N is None else os.fsdecode(self.targets_N[index])


def as_bytes(texts: list[str]) -> Any:
    return np.array([os.fsencode(text) for text in texts], dtype=np.bytes_)


class ImageFiles(Images):
    """Files to predict, with the description and the normalisation of the data that the network was trained on.

    Raises:
        UserError: it was not trained on images.
    """

    def __init__(
        self, inputs: Inputs, *, about: Mapping[str, Any], network: Mapping[str, Any], channels_last: bool
    ) -> None:
        if missing := [key for key in NEEDED if not about.get(key)]:
            raise UserError(
                f"input: files can be read only for a network that was trained on images with {', '.join(NEEDED)} in the `about` of their "
                f"data; {', '.join(missing)} is not there. Type input=test, or val or train: a part of the run's own data."
            )
        super().__init__(
            image_size=about["image_size"], mean=about["mean"], std=about["std"], channels_last=channels_last
        )
        self.given_about, self.given_network = dict(about), dict(network)
        self.train = self.val = self.test = Readable(inputs, channels=self.channels, size=self.image_size)

    @cached_property
    def about(self) -> dict[str, Any]:
        return self.given_about

    def network_arguments(self) -> dict[str, Any]:
        return self.given_network

    @cached_property
    def fingerprint(self) -> str:
        """Of the list of files, to see that all processes have the same one."""
        return hashlib.sha256(self.test.names_N.tobytes()).hexdigest()
