"""Image files without a data set around them, prepared as the images that a network was trained on. Free of torch."""

# B batch · N file

import hashlib
import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from lockstep.data.decoding import as_bytes, decoded_all
from lockstep.data.images import Images
from lockstep.data.inputs import Inputs
from lockstep.data.pixels import original_size
from lockstep.data.samples import Indices
from lockstep.errors import UserError

NEEDED = ("image_size", "channels", "mean", "std")  # in the `about` of the training data


class Readable:
    """Image files, decoded when they are read. `problem` says why a file could not be read: its image is then black."""

    def __init__(self, inputs: Inputs, *, channels: int, size: int) -> None:
        self.base, self.names_N = inputs.base, as_bytes(inputs.names)
        self.targets_N = None if inputs.targets is None else as_bytes(inputs.targets)
        self.channels, self.size = channels, size

    def __len__(self) -> int:
        return len(self.names_N)

    def __getitem__(self, indices: Indices) -> dict[str, Any]:
        files, problems = [self.base / self.name(index) for index in indices], [""] * len(indices)
        image_BCHW = decoded_all(files, channels=self.channels, size=self.size, problems=problems)
        return {"input": image_BCHW, "problem": problems}

    def original_size(self, index: int) -> tuple[int, int]:
        """Width and height of a file, from its header."""
        from PIL import Image

        with Image.open(self.base / self.name(index)) as image:
            return original_size(image)

    def name(self, index: int) -> str:
        return os.fsdecode(self.names_N[index])

    def target(self, index: int) -> str | None:
        return None if self.targets_N is None else os.fsdecode(self.targets_N[index])


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
        known = {key: about[key] for key in ("image_size", "mean", "std")}
        super().__init__(**known, channels_last=channels_last)
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
