"""Loads this folder: a trained network with its preprocessing. Needs torch, Pillow, and the packages that README.md names.

from load import load
model = load(".")                          # this folder, or a different one
model.predict(image_BCHW)                  # uint8 images of any size, 0 to 255: [{"class": "seven", "probability": 0.98}, ...]
model.predict(*inputs)                     # other data: the inputs that README.md names
model.predict_files(["a.png", "b.jpg"])    # the same for files, with `path` and `error`

python load.py <folder or files> ... [--csv <file>]
"""

import argparse
import csv
import importlib
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

# B batch · C channel · H W pixel · K class


AT_ONCE = 16  # samples in a batch
# From the network's outputs to probabilities of classes (per image or per pixel), of the next token or of labels, or to numbers.
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda output: output.float().softmax(1),
    "next_token": lambda output: output[:, -1].float().softmax(1),
    "sigmoid": lambda output: output.float().sigmoid(),
    "identity": lambda output: output.float().flatten(1),
    "none": lambda output: output,
}


class Images:
    """Reads image files and prepares them as in training."""

    def __init__(self, pixels: Any, *, channels: int, image_size: int, mean: Any, std: Any, **framing: Any) -> None:
        self.pixels, self.endings = pixels, pixels.ENDINGS
        self.channels, self.frame = channels, pixels.Frame(image_size, **framing)
        # from uint8 images_BCHW of any size to the input of the network
        self.normalise = pixels.Preprocess(self.frame, mean=mean, std=std)

    def read(self, path: Path) -> dict[str, Any]:
        with warnings.catch_warnings(), Image.open(path) as image:
            warnings.simplefilter("ignore")  # about odd EXIF data and palettes
            return {"input": self.pixels.to_array(image, channels=self.channels, frame=self.frame)}

    def mask_size(self, path: Path) -> Any:
        with Image.open(path) as image:
            return self.pixels.original_size(image)


@dataclass(frozen=True)
class Model:
    """A network for evaluation, with its preprocessing and the names of its outputs: classes, labels or targets."""

    net: nn.Module
    reader: Any  # with `read(path)` and `preprocess(batch)`; None if files cannot be read
    pixels: ModuleType  # preprocess.py: masks to images, errors to text
    inputs: Any  # the network's arguments as nested names of a batch's values; None: images
    named: list[str]  # keyword names of the last arguments
    classes: list[str]
    activation: str
    threshold: float | None  # of labels

    @torch.inference_mode()
    def outputs(self, *inputs: Any) -> Any:
        """Probabilities or numbers for uint8 images or for the network's arguments: BK, or BKHW for a class per pixel."""
        if self.inputs is None:
            inputs = (self.reader.normalise(inputs[0]),)
        return ACTIVATIONS[self.activation](self.call(*inputs))

    def call(self, *inputs: Any) -> Any:
        first = len(inputs) - len(self.named)
        return self.net(*inputs[:first], **dict(zip(self.named, inputs[first:], strict=True)))

    def predict(self, *inputs: Any) -> list[dict[str, Any]]:
        """A row for each sample, as Lockstep's predict.py writes it."""
        output = self.outputs(*inputs)
        if self.activation == "none":
            if isinstance(output, list | tuple):
                output = {f"output_{index}": value for index, value in enumerate(output)}
            output = output if isinstance(output, dict) else {"output": output}
            columns = [digits(tensor.tolist()) for tensor in output.values()]
            return [dict(zip(output, row, strict=True)) for row in zip(*columns, strict=True)]
        if self.activation == "identity":
            return [dict(zip(self.classes, row, strict=True)) for row in digits(output.tolist())]
        if self.threshold is not None:
            present = (output > self.threshold).tolist()
            return [{"labels": [n for n, is_on in zip(self.classes, row, strict=True) if is_on]} for row in present]
        if output.dim() == 4:
            return [{"mask": mask_HW} for mask_HW in output.argmax(1)]
        name = "token" if self.activation == "next_token" else "class"
        best = zip(*(x.tolist() for x in output.max(1)), strict=True)
        return [{name: self.classes[index], "probability": digits(value)} for value, index in best]

    def samples(self, paths: Iterable[str]) -> Iterator[tuple[dict[str, Any], Any]]:
        """For each sample in the files, the first cells of its row and its values. If it cannot be read, an `error` cell and None."""
        first: dict[str, Any] = {}
        for path in paths:
            try:
                if not Path(path).is_file():  # a pipe or a device may never end
                    raise OSError("it is not a regular file")
                samples = samples_of(self.reader.read(Path(path)))
            except Exception as e:  # Pillow raises nearly anything for a broken file
                yield {"path": path, "error": self.pixels.read_error_text(e)}, None
                continue
            for row in range(len(samples)):
                facts = {"path": path} if isinstance(samples, list) else {"path": path, "row": row}
                first = first or samples[row]
                error = odd_shape(samples[row], first)
                yield {**facts, "error": error}, None if error else samples[row]

    def files(self, names: Iterable[str]) -> list[str]:
        """The files, and the files in the folders."""
        files: list[str] = []
        for path in map(Path, names):
            files += self.pixels.Walk([str(path)], self.reader.endings) if path.is_dir() else [str(path)]
        return files

    def arguments(self, samples: list[dict[str, Any]]) -> Any:
        """The arguments of `predict` for samples from `samples`."""
        columns = {name: [sample[name] for sample in samples] for name in samples[0]}
        batch = {n: v if isinstance(v[0], str) else torch.tensor(np.stack(v)) for n, v in columns.items()}
        return (batch["input"],) if self.inputs is None else fill_names(self.inputs, self.reader.preprocess(batch))

    def predict_files(self, paths: Iterable[str]) -> Iterator[dict[str, Any]]:
        """A row for each file, or for each row of a table, in order; one that cannot be read has only its path and the `error`.

        A `mask` is a Pillow image of the file's size.
        """
        remaining = self.samples(paths)
        while group := list(islice(remaining, AT_ONCE)):
            readable = [sample for _, sample in group if sample]
            rows = iter(self.predict(*self.arguments(readable)) if readable else ())
            for facts, sample in group:
                row, error = next(rows) if sample else {}, facts.pop("error")
                if "mask" in row:
                    mask_HW, size = row["mask"].numpy(), self.reader.mask_size(Path(facts["path"]))
                    frame = getattr(self.reader, "frame", self.pixels.Frame(len(mask_HW)))
                    row["mask"] = frame.mask(mask_HW, size)
                yield {**facts, **row, "error": error}


def samples_of(content: Any) -> Any:
    """What `read` returned as a sequence of samples: a list of one sample, or Arrays of several."""
    samples = [content] if isinstance(content, Mapping) else content
    if not len(samples):
        raise ValueError("it contains no samples")
    return samples


def odd_shape(sample: dict[str, Any], first: dict[str, Any]) -> str:
    """Why a sample does not fit into a batch with the `first`; empty if it does."""
    shapes, expected = ({name: np.shape(value) for name, value in each.items()} for each in (sample, first))
    names = (name for name in expected if shapes.get(name) != expected[name])
    return next((f"its {n} has shape {shapes.get(n)}, but in other files {expected[n]}" for n in names), "")


def fill_names(names: Any, batch: dict[str, Any]) -> Any:
    """The values of a batch in place of their names."""
    if isinstance(names, dict):
        return {key: fill_names(name, batch) for key, name in names.items()}
    return tuple(fill_names(name, batch) for name in names) if isinstance(names, list) else batch[names]


def digits(value: Any) -> Any:
    """A number, or nested lists of numbers, rounded to the digits of a float32."""
    if isinstance(value, list):
        return [digits(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def module(path: Path) -> ModuleType:
    spec: Any = importlib.util.spec_from_file_location(f"exported_{path.stem}", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def locate_class(folder: Path, target: str) -> Any:
    """The class that model.json names, in network.py, in a package in source/, or in an installed library."""
    name, _, attribute = target.rpartition(".")
    if name == "network":
        return getattr(module(folder / "network.py"), attribute)
    source, package = folder / "source", name.partition(".")[0]
    if not (source / package).is_dir():
        return getattr(importlib.import_module(name), attribute)
    loaded = {key: sys.modules.pop(key) for key in list(sys.modules) if key.partition(".")[0] == package}
    sys.path.insert(0, str(source))
    importlib.invalidate_caches()
    try:
        return getattr(importlib.import_module(name), attribute)
    finally:
        if loaded:  # this process continues with the copy of the package that it had imported
            sys.path.remove(str(source))
            for key in [key for key in sys.modules if key.partition(".")[0] == package]:
                del sys.modules[key]
            sys.modules.update(loaded)


def load(folder: str | Path = Path(__file__).parent) -> Model:
    """The model of an exported folder, on the CPU."""
    folder = Path(folder).resolve()
    names = ("model", "preprocessing", "classes")
    model, data, classes = (json.loads((folder / f"{name}.json").read_bytes()) for name in names)
    whole = locate_class(folder, model["target"])(**model["arguments"])
    net = whole.get_submodule(model["network"])  # empty: all of it
    net.load_state_dict(load_file(folder / "model.safetensors"))
    pixels, reader = module(folder / "preprocess.py"), None
    if model["inputs"] is None:
        reader = Images(pixels, **data)
    elif model["reader"]:
        if getattr(importlib.util.find_spec("lockstep"), "origin", None) is None:
            sys.path.append(str(folder / "standin"))  # for its class DataSet
        reader = locate_class(folder, model["reader"]).for_files(data)
    options = {key: model[key] for key in ("inputs", "named", "activation", "threshold")}
    return Model(net=net.eval(), reader=reader, pixels=pixels, classes=classes, **options)


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> None:
    """Lists become a|b, missing values empty cells."""
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: text(value) for name, value in row.items()} for row in rows)


def with_saved_masks(rows: Iterable[dict[str, Any]], folder: Path) -> Iterator[dict[str, Any]]:
    """Writes masks as PNG files to `folder`, and replaces them by their paths."""
    for number, row in enumerate(rows):
        if "mask" in row:
            folder.mkdir(exist_ok=True)
            row["mask"].save(folder / f"{number:06}.png")
            row["mask"] = f"{folder.name}/{number:06}.png"
        yield row


def text(value: Any) -> Any:
    return "|".join(map(str, value)) if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs this folder's network on files, and prints its predictions.")
    parser.add_argument("files", nargs="+", help="files or folders of files")
    parser.add_argument("--csv", type=Path, help="write a table with a row for each file instead of printing")
    args = parser.parse_args()
    model = load()
    if model.reader is None:
        parser.error("this folder was exported without a file reader; README.md lists the network's inputs")
    rows = model.predict_files(model.files(args.files))
    if args.csv:
        table = list(with_saved_masks(rows, args.csv.with_name(f"{args.csv.stem}-mask")))
        longest = max(table, key=len, default={"path": ""})  # the row of a file that cannot be read has fewer columns
        write_csv(args.csv, longest, table)
        return
    for row in rows:
        path, error = row.pop("path"), row.pop("error")
        values = ", ".join(f"{name} {text(value)}" for name, value in row.items() if name != "mask")
        line = f"{path}: {f'cannot be read: {error}' if error else values}"
        print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))  # names may hold terminal escapes


if __name__ == "__main__":
    main()
