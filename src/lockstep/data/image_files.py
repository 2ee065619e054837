"""Image files without a data set around them, as `input=` of predict.py names them, prepared as the images that a network was trained on."""

import glob
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.data.dataset import Indices
from lockstep.data.folder import ENDINGS, PART_NAMES, images_below, table
from lockstep.data.images import Images, as_bytes, decoded_all
from lockstep.data.pixels import original_size
from lockstep.errors import UserError

# --- Lists the image files that `input=` of predict.py names. Free of torch and NumPy ---

PARTS = tuple(dict.fromkeys(PART_NAMES.values()))
WILD = "*?["


@dataclass(frozen=True)
class Inputs:
    """Image files in the order of their rows: `names` as the table shows them, relative to `base` or absolute."""

    base: Path
    names: list[str]
    targets: list[str] | None = None  # the cells of a CSV


def find_inputs(given: str) -> Inputs:
    """The files of a folder (with all below it), a glob, a CSV with a column `path` (a TSV has tabs), or one image file.

    Raises:
        UserError: there is no such thing, or it holds no images.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        found = Inputs(Path(), list(images_below(path)))
        what = f"holds no images (files that end in {', '.join(ENDINGS)})"
    elif path.is_file():
        return from_csv(path) if path.suffix.lower() in (".csv", ".tsv", ".txt") else Inputs(Path(), [str(path)])
    elif any(letter in given for letter in WILD):
        matches = sorted(glob.iglob(str(path), recursive=True))  # noqa: PTH207  # Path.glob refuses absolute ones
        found, what = Inputs(Path(), [name for name in matches if Path(name).is_file()]), "matches no file"
    else:
        raise UserError(
            f"input={given} does not exist. Type a folder of images, a glob in quotes, a CSV with a column path, an image file, "
            f"or a part of the run's own data: {', '.join(PARTS)}."
        )
    if not found.names:
        raise UserError(f"input={given} {what}. Type another folder or file.")
    return found


def from_csv(path: Path) -> Inputs:
    """The column `path`, relative to the CSV's folder, and the column `target` if there is one."""
    columns, rows = table(path, ("path",), "path,target", f"input={path}")
    targets = [(row["target"] or "").strip() for row in rows] if "target" in columns else None
    return Inputs(path.parent, [row["path"] or "" for row in rows], targets)


# --- Image files without a data set around them, prepared as the images that a network was trained on. Free of torch ---

# B batch · N file


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
