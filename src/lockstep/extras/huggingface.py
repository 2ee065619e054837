"""A folder of Hugging Face's `save_to_disk`: Arrow files, mapped into memory. Needs the package datasets."""

import hashlib
import importlib.util
import io
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.config.words import nearest
from lockstep.data.cache import cache_folder, decoded, key_of
from lockstep.data.dataset import Indices
from lockstep.data.folder import part_names
from lockstep.data.images import decoded_all
from lockstep.data.sampler import PARTS, divided, taken_from_train
from lockstep.errors import UserError
from lockstep.extras.adapters import Foreign

# --- Rows of a table of Hugging Face's datasets as batches. Free of torch ---

# B batch · C channel · H W pixel


class Rows:
    """Rows of a table as batches. Images stay encoded in the table until they are read."""

    def __init__(
        self,
        table: Any,
        places: Indices,
        columns: Mapping[str, str],
        names: Mapping[str, list[str]],
        *,
        channels: int,
        size: int,
    ) -> None:
        self.places, self.names, self.channels, self.size = places, names, channels, size
        self.columns = {key: readable(table, column) for key, column in columns.items()}

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, indices: Indices) -> dict[str, NDArray[Any]]:
        rows = self.places[indices].tolist()
        found = {key: table[rows][table.column_names[0]] for key, table in self.columns.items()}
        target = found["target"]
        if "classes" in self.names:
            target = class_numbers(target, self.names["classes"])
        elif "targets" in self.names:
            target = target.astype(np.float32).reshape(len(rows), 1)
        given = found["input"]
        return {"input": self.decoded(given) if isinstance(given, list) else given, "target": target}

    def decoded(self, files: list[Mapping[str, Any]]) -> NDArray[np.uint8]:
        """image_BCHW of encoded images, or of files that the table names."""
        opened = [io.BytesIO(file["bytes"]) if file["bytes"] is not None else file["path"] for file in files]
        return decoded_all(opened, channels=self.channels, size=self.size)


def readable(table: Any, column: str) -> Any:
    """One column, as encoded images or as arrays."""
    import datasets

    alone = table.select_columns([column])
    if isinstance(table.features[column], datasets.Image):
        return alone.cast_column(column, datasets.Image(decode=False))
    return alone.with_format("numpy")


def class_numbers(values: NDArray[Any], classes: list[str]) -> NDArray[np.int64]:
    """Class numbers of targets that are numbers or names of classes."""
    if values.dtype.kind in "iu":
        return values.astype(np.int64)
    place = {name: number for number, name in enumerate(classes)}
    return np.array([place[value] for value in values.tolist()], np.int64)


# --- A folder of Hugging Face's `save_to_disk`: Arrow files, mapped into memory. Needs the package datasets ---


class HuggingFace(Foreign):
    """Two columns of the tables in `root`: images, which workers decode, or numbers.

    Raises:
        UserError: `root` is no such folder, a column is missing, or the targets are neither classes nor numbers.
    """

    def __init__(
        self,
        *,
        root: str,
        input: str = "image",
        target: str = "label",
        test_fraction: float = 0.1,
        val_fraction: float = 0.1,
        folds: int | None = None,
        cache_dir: str | None = None,
        **images: Any,
    ) -> None:
        super().__init__(**images)
        self.root, self.cache = Path(root).expanduser(), cache_folder(cache_dir)
        self.columns = {"input": input, "target": target}
        self.fractions = taken_from_train(test=test_fraction, val=val_fraction, folds=folds)

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        yield from super().problems(data)
        if importlib.util.find_spec("datasets") is None:
            yield "data=huggingface needs the package datasets, which is not installed. Type uv sync --extra huggingface, or pip install datasets."

    @cached_property
    def tables(self) -> dict[str, Any]:
        """The tables of the folder by part."""
        import datasets

        if not self.root.is_dir():
            raise UserError(
                f"data.root={self.root} does not exist. Type data.root=<folder that save_to_disk has written>."
            )
        try:
            found: Any = datasets.load_from_disk(str(self.root))
        except FileNotFoundError:
            raise UserError(
                f"data.root={self.root} is not a folder written by `save_to_disk`. Type dataset.save_to_disk({str(self.root)!r}) in Python, or data.root=<folder>."
            ) from None
        given = found if isinstance(found, dict) else {"train": found}
        names = part_names(given, f"data.root={self.root}")
        tables = {part: given[names[part]] for part in PARTS if part in names}
        if "train" not in tables:
            raise UserError(f"data.root={self.root} has no split `train`; it has {', '.join(found)}.")
        for key, column in self.columns.items():
            there = tables["train"].column_names
            if column not in there:
                raise UserError(
                    f"data.{key}={column}: there is no such column{nearest(column, there)}; data.root={self.root} has {', '.join(there)}."
                )
        return tables

    @cached_property
    def names(self) -> dict[str, list[str]]:  # type: ignore[override]
        column = self.columns["target"]
        feature = self.tables["train"].features[column]
        kind = str(getattr(feature, "dtype", ""))
        if hasattr(feature, "names"):
            return {"classes": list(feature.names)}
        if kind == "string":
            return {"classes": sorted(self.tables["train"].unique(column))}
        if kind.startswith(("int", "uint")):
            return {"classes": [str(number) for number in range(max(self.tables["train"].unique(column)) + 1)]}
        return {"targets": [column]} if kind.startswith("float") else {}

    def prepare(self) -> None:
        """Raises UserError if a target is not a class, such as the -1 of test sets without answers."""
        classes, column = self.names.get("classes"), self.columns["target"]
        for part, table in self.tables.items() if classes else ():
            places = {name: place for place, name in enumerate(classes or ())}
            if wrong := [value for value in table.unique(column) if places.get(value, value) not in places.values()]:
                raise UserError(
                    f"data.root={self.root}: {column}={wrong[0]} of the {part} part is not one of the {len(places)} classes of train. "
                    "Remove these rows; or remove the part, which is then taken from train."
                )
        super().prepare()

    @cached_property
    def places(self) -> dict[str, tuple[Any, Indices]]:
        """The table and rows of each part; missing parts are taken from train."""
        train, column = self.tables["train"], self.columns["target"]
        classes = self.names.get("classes")
        strata = class_numbers(train.with_format("numpy")[column][:], classes) if classes else np.zeros(len(train), int)
        fractions = {part: fraction for part, fraction in self.fractions.items() if part not in self.tables}
        part_N = divided(np.full(len(train), "train"), strata, fractions)
        own = {part: (table, np.arange(len(table))) for part, table in self.tables.items()}
        return own | {part: (train, np.flatnonzero(part_N == part)) for part in ("train", *fractions)}

    def open_part(self, part: str) -> Rows | None:
        if part not in self.places:
            return None
        table, places = self.places[part]
        if not len(places):
            raise UserError(f"data.root={self.root}: the {part} part has no rows. Add some.")
        return Rows(table, places, self.columns, self.names, channels=self.channels, size=self.image_size)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the Arrow files, which are read once per machine, and of the columns and rows that are used."""
        files = sorted(self.root.rglob("*.arrow"))
        key = key_of("huggingface", files)
        whole = decoded(self.cache / key, lambda: ({}, {"sha256": [sha256(path) for path in files]}))
        rows = {part: rows.tobytes() for part, (_, rows) in self.places.items()}
        taken = (whole.extra()["sha256"], self.columns, self.names, rows)
        return hashlib.sha256(repr(taken).encode()).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
