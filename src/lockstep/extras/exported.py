"""Loads this folder: a trained network with its preprocessing. Needs torch and Pillow, and what README.md names.

from load import load
model = load(".")                          # the folder of this file, or another one
model.predict(image_BCHW)                  # uint8 images of any size, 0 to 255: [{"class": "seven", "probability": 0.98}, ...]
model.predict_files(["a.png", "b.jpg"])    # the same with `path` and `error`, of files

python load.py <folder or images> ... [--csv <file>]
"""

import argparse
import csv
import importlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

# B batch · C channel · H W pixel · K class


ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
AT_ONCE = 16  # files
# Of the network's outputs: probabilities of classes (or of the classes of each pixel), of labels, or numbers.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda output: output.softmax(1),
    "sigmoid": lambda output: output.sigmoid(),
    "identity": lambda output: output.flatten(1),
}


@dataclass(frozen=True)
class Model:
    """A network for evaluation, with its preprocessing and the names of its outputs: classes, labels or targets."""

    net: nn.Module
    preprocess: Any  # uint8 images_BCHW of any size to the input of `net`
    pixels: ModuleType  # preprocess.py: an opened image to bytes_CHW, and masks back to images
    classes: list[str]
    channels: int
    image_size: int
    activation: str
    threshold: float | None  # of labels

    @torch.inference_mode()
    def outputs(self, image_BCHW: Tensor) -> Tensor:
        """Probabilities, or numbers, of uint8 images: BK, or BKHW for a class per pixel."""
        return ACTIVATIONS[self.activation](self.net(self.preprocess(image_BCHW)).float())

    def predict(self, image_BCHW: Tensor) -> list[dict[str, Any]]:
        """A row for each uint8 image: what Lockstep's predict.py writes."""
        output = self.outputs(image_BCHW)
        if self.activation == "identity":
            return [dict(zip(self.classes, map(digits, row), strict=True)) for row in output.tolist()]
        if self.threshold is not None:
            present = (output > self.threshold).tolist()
            return [{"labels": [n for n, there in zip(self.classes, row, strict=True) if there]} for row in present]
        if output.dim() == 4:
            return [{"mask": mask_HW} for mask_HW in output.argmax(1)]
        values, places = output.max(1)
        found = zip(places.tolist(), values.tolist(), strict=True)
        return [{"class": self.classes[place], "probability": digits(value)} for place, value in found]

    def predict_files(self, paths: Iterable[str]) -> Iterator[dict[str, Any]]:
        """A row for each file, in their order; one that cannot be read has only its path and the `error`.

        A `mask` is a Pillow image of the file's size.
        """
        from PIL import Image

        left = iter(paths)
        while group := list(islice(left, AT_ONCE)):
            images, sizes, errors = [], [], []
            for path in group:
                try:
                    with warnings.catch_warnings(), Image.open(path) as image:
                        warnings.simplefilter("ignore")  # about odd EXIF data and palettes
                        size = self.pixels.original_size(image)
                        image_CHW = self.pixels.to_array(image, channels=self.channels, size=self.image_size)
                    images.append(torch.tensor(image_CHW))
                    sizes.append(size)
                    errors.append("")
                except Exception as e:  # Pillow raises nearly anything for a broken file
                    errors.append(" ".join(str(e).split()) or type(e).__name__)
            found = self.predict(torch.stack(images)) if images else []
            for row, size in zip(found, sizes, strict=True):
                if "mask" in row:
                    row["mask"] = self.pixels.mask_image(row["mask"].numpy(), size)
            rows = iter(found)
            for path, error in zip(group, errors, strict=True):
                yield {"path": path, **({} if error else next(rows)), "error": error}


def digits(value: float) -> float:
    """The digits that float32 has."""
    return float(f"{value:.7g}")


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"exported_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def network(folder: Path, target: str, arguments: dict[str, Any]) -> nn.Module:
    """The network that model.json names: of network.py, of a package in source/, or of an installed library."""
    name, _, made = target.rpartition(".")
    if name == "network":
        return getattr(module(folder / "network.py"), made)(**arguments)
    source, package = folder / "source", name.partition(".")[0]
    if not (source / package).is_dir():
        return getattr(importlib.import_module(name), made)(**arguments)
    loaded = {key: sys.modules.pop(key) for key in list(sys.modules) if key.partition(".")[0] == package}
    sys.path.insert(0, str(source))
    importlib.invalidate_caches()
    try:
        return getattr(importlib.import_module(name), made)(**arguments)
    finally:
        if loaded:  # this process has another copy of the package, which it goes on with
            sys.path.remove(str(source))
            for key in [key for key in sys.modules if key.partition(".")[0] == package]:
                del sys.modules[key]
            sys.modules.update(loaded)


def load(folder: str | Path = Path(__file__).parent) -> Model:
    """The model of an exported folder, on the CPU."""
    folder = Path(folder).resolve()
    about = json.loads((folder / "model.json").read_text())
    if about["timm"]:
        import timm

        net = timm.create_model(about["timm"], **about["arguments"])
    else:
        net = network(folder, about["target"], about["arguments"])
    net.load_state_dict(load_file(folder / "model.safetensors"))
    images = json.loads((folder / "preprocessing.json").read_text())
    pixels = module(folder / "preprocess.py")
    return Model(
        net=net.eval(),
        channels=images.pop("channels"),
        preprocess=pixels.Preprocess(**images),
        pixels=pixels,
        classes=json.loads((folder / "classes.json").read_text()),
        image_size=images["image_size"],
        activation=about["activation"],
        threshold=about["threshold"],
    )


def files(given: Iterable[str]) -> Iterator[str]:
    """Image files; of a folder, all below it by name, those of a folder before those of the folders in it."""
    for name in given:
        if not Path(name).is_dir():
            yield name
        for place, below, names in os.walk(name, followlinks=True):
            below[:] = sorted(each for each in below if not each.startswith("."))
            found = (each for each in sorted(names) if each.lower().endswith(ENDINGS) and not each.startswith("."))
            yield from (f"{place}{os.sep}{each}" for each in found)


def write_csv(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Lists as a|b; masks as PNG files in a folder beside the table."""
    first: list[dict[str, Any]] = []  # up to one that could be read, which has all columns
    while (not first or first[-1]["error"]) and (row := next(rows, None)):
        first.append(row)
    columns = list(first[-1]) if first else ["path"]
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for number, row in enumerate(chain(first, rows)):
            if "mask" in row:
                row["mask"] = save_mask(row["mask"], path.with_name(f"{path.stem}-mask"), number)
            writer.writerow([text(row.get(name)) for name in columns])


def save_mask(mask: Any, folder: Path, number: int) -> str:
    folder.mkdir(exist_ok=True)
    mask.save(folder / f"{number:06}.png")
    return f"{folder.name}/{number:06}.png"


def text(value: Any) -> Any:
    return "|".join(map(str, value)) if isinstance(value, list) else value


def said(row: dict[str, Any]) -> str:
    """A row as a line."""
    if row["error"]:
        return f"cannot be read: {row['error']}"
    if "class" in row:
        return f"{row['class']} ({row['probability']:.1%})"
    shown = {name: value for name, value in row.items() if name not in ("path", "error", "mask")}
    if "mask" in row:
        width, height = row["mask"].size
        shown["mask"] = f"{width} x {height}, classes {np.unique(row['mask']).tolist()}"
    return ", ".join(f"{name}: {text(value)}" for name, value in shown.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicts image files with the network of this folder.")
    parser.add_argument("images", nargs="+", help="image files, or folders of them")
    parser.add_argument("--csv", type=Path, help="write a table with a row for each file instead of printing")
    args = parser.parse_args()
    rows = load().predict_files(files(args.images))
    if args.csv:
        write_csv(args.csv, rows)
        return
    for row in rows:
        print(f"{row['path']}: {said(row)}")


if __name__ == "__main__":
    main()
