"""Data of other libraries: torch Datasets, torchvision datasets by name, Hugging Face folders. Imports torch only when samples are read."""

import hashlib
import importlib.util
import inspect
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.config.instantiate import problems
from lockstep.data.dataset import Batch, bytes_of, classes_of, is_pillow, join_names, named
from lockstep.data.parts import batch_of
from lockstep.data.sampler import PARTS, Indices, divide_parts
from lockstep.errors import UserError, did_you_mean, raise_problems
from lockstep.kit.cache import cache_folder, decode_once, file_hash, key_of, one_download
from lockstep.kit.images import Images, decode_all, in_frame
from lockstep.kit.listing import explain_root_error, part_names
from lockstep.kit.pixels import read_error_text
from lockstep.kit.published import folder_contents, has_photos

IMAGE_SIZE = 224


class Pictures:
    """A torch Dataset whose PIL images become bytes. Has its attributes. `decoding`: arguments of `in_frame`."""

    def __init__(self, dataset: Any, decoding: Mapping[str, Any]) -> None:
        self.dataset, self.decoding = dataset, decoding

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> dict[str, Any]:
        values = named(self.dataset[index], self.dataset)
        return in_frame(values, **self.decoding) if is_pillow(values["input"]) else values


class WrappedDataset(Images):
    """A data set from torch Datasets: `held` has one for each part; `val` may be None. A subclass may override `open_part` and `names` instead.

    Images are resized to `image_size` when they are decoded, and normalised on the device. Other samples reach the network
    unchanged. The first training sample decides which kind it is.
    """

    held: Mapping[str, Any]

    def __init__(self, *, image_size: int = IMAGE_SIZE, **images: Any) -> None:
        super().__init__(image_size=image_size, **images)

    for_files = Images.for_files  # type: ignore[assignment]  # only training samples tell whether there are others

    def open_part(self, part: str) -> Any:
        dataset = self.held[part]
        return None if dataset is None else Pictures(dataset, self.decoding)

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """Names of the targets: `classes`, `targets`, ..."""
        return {"classes": names} if (names := class_names(self.held["train"])) else {}

    @cached_property
    def part_names(self) -> Mapping[str, Any]:  # type: ignore[override]
        declared = {part: class_names(self.samples(part), numbers=False) for part in self.every_part}
        new = dict(zip(declared["train"], self.names.get("classes", ()), strict=False))  # data.classes renames them
        return {part: {"classes": [new.get(name, name) for name in names]} for part, names in declared.items() if names}

    @cached_property
    def first(self) -> NDArray[Any]:
        return np.asarray(batch_of(self.train, [0])["input"][0])

    @property
    def holds_images(self) -> bool:
        return self.first.dtype == np.uint8 and self.first.ndim == 3

    def prepare(self) -> None:
        """Raises UserError if image options are set and the samples are not images."""
        if not self.holds_images:
            raise_problems(
                f"data.{key}={value} has no effect: `input` is {self.first.dtype} of shape {self.first.shape}, not a uint8 image (CHW). Remove it."
                for key, default in {"image_size": IMAGE_SIZE, "channels": 3}.items()
                if (value := getattr(self, key)) != default
            )
        if bytes_of(self.train) is None:
            self.notice = (
                "data.train returns different samples for the same seed: it uses a source of randomness that cannot be seeded. Batches then depend "
                "on loader.num_workers, and a resumed run differs. Store its generators in attributes of the data set (docs/augment.md)."
            )

    @property
    def unit(self) -> str:  # type: ignore[override]
        return "images" if self.holds_images else "samples"

    @cached_property
    def metadata(self) -> dict[str, Any]:
        return {**(super().metadata if self.holds_images else {}), **self.names}

    def model_kwargs(self) -> dict[str, Any]:
        if self.holds_images:
            return super().model_kwargs()
        shape = self.first.shape
        if len(shape) == 3:
            return {"in_channels": shape[0], "image_size": shape[-1]}
        return {"in_features": shape[0]} if len(shape) == 1 else {}

    def preprocess(self, batch: Batch) -> Batch:
        return super().preprocess(batch) if self.holds_images else batch


def class_names(dataset: Any, *, numbers: bool = True) -> list[str]:
    """Class names, or else class numbers, of a Dataset, Subset or ConcatDataset; empty without either. Raises UserError: joined Datasets differ."""
    if names := declared_names(getattr(dataset, "classes", None)):
        return names
    if numbers and (class_N := classes_of(dataset)) is not None and len(class_N):
        return numbers_as_names(np.unique(class_N), len(class_N))
    inner = [dataset.dataset] if hasattr(dataset, "dataset") else getattr(dataset, "datasets", None) or []
    lists = sorted({tuple(names) for child in inner if (names := class_names(child, numbers=False))})
    if len(lists) > 1:
        raise UserError(
            f"{type(dataset).__name__} joins Datasets with the classes {' and '.join(map(join_names, lists))}: class numbers would be ambiguous. Give them the same classes in the same order."
        )
    return [*lists[0]] if lists else max((class_names(child, numbers=numbers) for child in inner), key=len, default=[])


def declared_names(classes: Any) -> list[str]:
    """The names of classes 0, 1, ... in a list, or in a dict to or from numbers; empty for anything else, such as the numbers that occur."""
    if isinstance(classes, Mapping):
        name_of = dict((value, key) if isinstance(value, Integral) else (key, value) for key, value in classes.items())
        classes = [name_of.get(number) for number in range(len(classes))]
    names = classes.tolist() if getattr(classes, "ndim", 0) else classes
    if not isinstance(names, list | tuple) or None in names:
        return []
    if all(isinstance(name, Integral) for name in names) and [*names] != [*range(len(names))]:
        return []
    return [str(name[0] if isinstance(name, tuple) else name) for name in names]


def numbers_as_names(numbers: Sequence[int] | NDArray[Any], samples: int) -> list[str]:
    """Names for 0 to the largest class number that occurs; empty if the numbers are not classes, such as prices or table keys."""
    count = int(max(numbers, default=-1)) + 1
    return [*map(str, range(count))] if count <= max(samples, 2 * len(numbers)) else []


class TorchDataset(WrappedDataset):
    """`train`, `test` and optionally `val` and `evaluation_sets`: Datasets whose samples are (input, target) or a dict; PIL images become bytes.

    Pass `classes` if the training Dataset has neither `classes` nor `targets`. A Dataset may have an attribute `fingerprint`; otherwise
    it is computed from the Dataset's arrays and some of its samples.
    """

    def __init__(
        self, *, train: Any, test: Any, val: Any = None, evaluation_sets: Mapping[str, Any] | None = None,
        classes: Sequence[str] | None = None, **images: Any
    ) -> None:  # fmt: skip
        super().__init__(**images)
        self.held = {"train": train, "val": val, "test": test}
        self.evaluation_sets = {name: Pictures(held, self.decoding) for name, held in (evaluation_sets or {}).items()}
        if classes:
            self.names = {"classes": list(classes)}

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        yield from super().problems(data)
        nodes = {part: data.get(part) for part in PARTS}
        nodes |= {f"evaluation_sets.{name}": node for name, node in (data.get("evaluation_sets") or {}).items()}
        for part, node in nodes.items():
            if isinstance(node, Mapping):
                yield from problems(node, f"data.{part}", given={})
            elif part != "val":
                yield f"data.{part} is missing. Set it to a Dataset, for example data.{part}={{_target_: my_package.data.Flowers, part: {part}}}."


# --- torchvision data sets by name ---

SPLITS = {"train": ("train", "trainval", "train-standard"), "val": ("val", "valid"), "test": ("test",)}


class Torchvision(WrappedDataset):
    """`torchvision.datasets.<dataset>(root, ...)` with its official splits. Without a test split, the validation split is the test set.

    Raises UserError: there is no such data set, it has no test split, or it is neither on disk nor downloadable.
    """

    source = "disk"

    def __init__(
        self, *, dataset: str, root: str, source: str = "auto", arguments: Mapping[str, Any] | None = None, cache_dir: str | None = None,
        **images: Any
    ) -> None:  # fmt: skip
        super().__init__(**images)
        self.dataset, self.root = dataset, Path(root).expanduser()
        self.asked, self.arguments, self.cache = source, dict(arguments or {}), cache_folder(cache_dir)

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        yield from super().problems(data)
        if (name := str(data.get("dataset"))) not in (names := torchvision_names()):
            yield f"data.dataset={name} is not in torchvision.datasets{did_you_mean(name, names)}. Set data.dataset=<name>, such as Flowers102; for your own Dataset class, set data=torch; for your own images, data=folder."
        if data.get("source") == "embedded":
            yield "data.source=embedded: no package contains torchvision's data sets. Set data.source=auto."

    @cached_property
    def held(self) -> dict[str, Any]:  # type: ignore[override]
        import torchvision

        dataset_class = getattr(torchvision.datasets, self.dataset)
        create = partial(dataset_class, **{"root": str(self.root), **self.arguments})
        has_splits = "split" in inspect.signature(dataset_class).parameters and "split" not in self.arguments
        key, choices = ("split", SPLITS) if has_splits else ("train", {"train": (True,), "val": (), "test": (False,)})
        parts = {part: self.first_part(create, key, choices[part]) for part in PARTS}
        if parts["test"] is None and parts["val"] is not None:
            parts |= {"test": parts["val"], "val": None}
            self.notice = f"{self.dataset} has no test split: its validation split is the test set, and validation samples are taken from train."
        if parts["train"] is None or parts["test"] is None:
            raise UserError(f"torchvision.datasets.{self.dataset} has no test split. Use data=folder, which adds one.")
        return parts

    def first_part(self, create: Callable[..., Any], key: str, values: Iterable[Any]) -> Any:
        """The first of these parts that the data set has; None if it has none."""
        for value in values:
            try:
                return self.make(partial(create, **{key: value}))
            except (ValueError, TypeError) as e:  # it has no such value, or no such argument
                if isinstance(e, UserError) or f"argument {key}" not in str(e).replace("'", ""):
                    raise
        return None

    def make(self, create: Callable[..., Any]) -> Any:
        """Opens the data set on disk, or else downloads it."""
        try:
            return create()
        except (RuntimeError, OSError) as e:
            error: Exception = e
        if self.asked == "download" or (self.asked == "auto" and not has_photos(self.root)):
            try:
                with suppress(TypeError), one_download(self.cache, self.dataset, self.root):  # some have no `download`
                    self.source = "download"
                    return create(download=True)
            except (RuntimeError, OSError) as e:
                error = e
        raise UserError(
            f"data.root={self.root} {folder_contents(self.root)[1]}: torchvision's {self.dataset} is not there and was not downloaded ({read_error_text(error)}). Set data.root=<folder that contains it>, or, if torchvision can download it, data.source=download on a machine with a network; for your own images, set data=folder data.root={self.root}."
        )


def torchvision_names() -> list[str]:
    """The data sets of torchvision.datasets, read from its source, because importing it takes seconds."""
    spec: Any = importlib.util.find_spec("torchvision")
    text = (Path(spec.origin).parent / "datasets/__init__.py").read_text(encoding="utf-8")
    return re.findall(r'"([A-Z]\w*)"', text.partition("__all__")[2])  # without the function that it also exports


# --- Folders written by Hugging Face's `save_to_disk`: memory-mapped Arrow files. Needs the package datasets ---


@dataclass(eq=False)
class Rows:
    """Rows of a table as batches. Images stay encoded in the table until they are read."""

    table: Any
    columns: Mapping[str, str]  # the table's columns for `input` and `target`
    places: Indices
    target_N: NDArray[Any] | None  # class numbers or values; None for other targets
    classes: Sequence[str] | None  # in the order of the part's class numbers
    decoding: dict[str, Any]

    def __len__(self) -> int:
        return len(self.places)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, NDArray[Any]]:
        values_of = self.table[self.places[indices].tolist()]
        values = {key: values_of[column] for key, column in self.columns.items()}
        if self.target_N is not None:
            values["target"] = self.target_N[indices]
        if isinstance(values["input"], list):  # encoded images, or paths of files
            files = [file["path"] if file["bytes"] is None else io.BytesIO(file["bytes"]) for file in values["input"]]
            values["input"] = decode_all(files, **self.decoding)
        return values


class HuggingFace(WrappedDataset):
    """Two columns of the tables in `root`: images, which workers decode, or numbers. Raises UserError: a split, column or value is missing."""

    source = "disk"

    def __init__(
        self, *, root: str, input: str = "image", target: str = "label", test_fraction: float = 0.1, val_fraction: float = 0.1,
        folds: int | None = None, cache_dir: str | None = None, **images: Any
    ) -> None:  # fmt: skip
        super().__init__(**images)
        self.root, self.cache = Path(root).expanduser(), cache_folder(cache_dir)
        self.columns = {"input": input, "target": target}
        self.fractions = {"test": test_fraction} if folds else {"test": test_fraction, "val": val_fraction}

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        yield from super().problems(data)
        if importlib.util.find_spec("datasets") is None:
            yield "data=huggingface needs the package datasets, which is not installed. Run uv sync --extra huggingface, or pip install datasets."

    @cached_property
    def tables(self) -> dict[str, Any]:
        """The tables of the folder by part."""
        import datasets

        where = f"data.root={self.root}"
        with explain_root_error(self.root):
            try:
                saved: Any = datasets.load_from_disk(str(self.root))
            except FileNotFoundError:  # raised for any other folder
                raise UserError(
                    f"{where} {folder_contents(self.root)[1]}: it is not a folder written by `save_to_disk`. Run dataset.save_to_disk({str(self.root)!r}) in Python, or set data.root=<folder>; for your own images, set data=folder {where}."
                ) from None
        by_name = saved if isinstance(saved, dict) else {"train": saved}
        names = part_names(by_name, where)
        if "train" not in names:
            raise UserError(f"{where} has no split `train`; it has {', '.join(by_name)}.")
        columns = [*self.columns.values()]
        try:
            tables = {part: by_name[names[part]].select_columns(columns) for part in PARTS if part in names}
        except ValueError as e:
            raise UserError(f"{where}: {e} Set data.input and data.target to two of these columns.") from None
        raise_problems(
            f"{where}: {columns[0]} has no value in row {row} of the {part} part. Remove such rows."
            for part, table in tables.items()
            for row in np.flatnonzero(table.data.column(columns[0]).is_null())[:1]
        )
        return tables

    @cached_property
    def names(self) -> dict[str, list[str]]:  # type: ignore[override]
        train, column = self.tables["train"], self.columns["target"]
        feature = train.features[column]
        kind = str(getattr(feature, "dtype", ""))
        if hasattr(feature, "names"):
            return {"classes": list(feature.names)}
        if kind.startswith(("int", "uint", "string")):
            values = sorted(value for value in train.unique(column) if value not in (None, ""))
            if names := values if kind == "string" else numbers_as_names(values, len(train)):
                return {"classes": names}
        return {"targets": [column]} if kind.startswith(("float", "int", "uint")) else {}

    def targets(self, part: str) -> NDArray[Any] | None:
        """Class numbers, or a column of numbers; None for other targets. Raises UserError: a value is not a class, such as null or -1."""
        if not self.names:
            return None
        column = self.columns["target"]
        values = self.tables[part][column][:]
        if "targets" in self.names:
            return np.array(values, np.float32).reshape(len(values), 1)
        classes = self.names["classes"]
        number = {key: index for index, name in enumerate(classes) for key in (name, index)}
        for row, value in enumerate(values):
            if value not in number:
                raise UserError(
                    f"data.root={self.root}: {column}={value} in row {row} of the {part} part is not one of the {len(classes)} classes of train. Remove such rows; or remove the part: it is then split off from train."
                )
        return np.array([number[value] for value in values], np.int64)

    @cached_property
    def rows(self) -> dict[str, Rows]:
        """The rows of each part; missing parts are split off train."""
        train, targets = self.tables["train"], {part: self.targets(part) for part in self.tables}
        strata: Any = targets["train"] if "classes" in self.names else np.zeros(len(train), int)
        fractions = {part: fraction for part, fraction in self.fractions.items() if part not in self.tables}
        part_N = divide_parts(np.full(len(train), "train"), strata, fractions)
        parts = {part: (part, np.arange(len(table))) for part, table in self.tables.items()}
        parts |= {part: ("train", np.flatnonzero(part_N == part)) for part in ("train", *fractions)}
        return {part: self.open_rows(source, index_N, targets[source]) for part, (source, index_N) in parts.items()}

    def open_rows(self, part: str, index_N: Indices, target_N: NDArray[Any] | None) -> Rows:
        from datasets import Image

        table = self.tables[part]
        classes = getattr(table.features[self.columns["target"]], "names", None)
        numbers = list[str]()
        for column, feature in table.features.items():
            if isinstance(feature, Image):
                table = table.cast_column(column, Image(decode=False))
            else:
                numbers.append(column)
        table = table.with_format("numpy", columns=numbers, output_all_columns=True)
        target_N = None if target_N is None else target_N[index_N]
        return Rows(table, self.columns, index_N, target_N, classes, self.decoding)

    def open_part(self, part: str) -> Rows | None:
        return self.rows.get(part)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the Arrow files, which are read once per machine, and of the columns and rows in use."""
        files = sorted(self.root.rglob("*.arrow"))
        folder = self.cache / key_of("huggingface", files)
        content = decode_once(folder, lambda: ({}, {"sha256": [file_hash(path, "sha256") for path in files]})).extra
        rows = {part: rows.places.tobytes() for part, rows in self.rows.items()}
        return hashlib.sha256(repr((content["sha256"], self.columns, self.names, rows)).encode()).hexdigest()
