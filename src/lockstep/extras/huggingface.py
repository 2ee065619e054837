"""A folder of Hugging Face's `save_to_disk`: Arrow files, mapped into memory. Needs the package datasets."""

import hashlib
import importlib.util
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.cache import cache_folder, decoded, hash_of, key_of
from lockstep.data.dataset import Indices
from lockstep.data.folder import part_names
from lockstep.data.images import decoded_all, reading
from lockstep.data.sampler import PARTS, divided
from lockstep.errors import UserError, did_you_mean
from lockstep.extras.adapters import Wrapped

# B batch · C channel · H W pixel


@dataclass(eq=False)
class Rows:
    """Rows of a table as batches. Images stay encoded in the table until they are read."""

    table: Any
    columns: Mapping[str, str]  # names of its columns: input, target
    places: Indices
    names: Mapping[str, list[str]]
    channels: int
    size: int

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, indices: Indices) -> dict[str, NDArray[Any]]:
        rows = self.places[indices].tolist()
        found = self.table[rows]
        values = {key: found[column] for key, column in self.columns.items()}
        if "classes" in self.names:
            values["target"] = class_numbers(values["target"], self.names["classes"])
        elif "targets" in self.names:
            values["target"] = values["target"].astype(np.float32).reshape(len(rows), 1)
        if isinstance(values["input"], list):  # encoded images, or files that the table names
            files = [file["path"] if file["bytes"] is None else io.BytesIO(file["bytes"]) for file in values["input"]]
            values["input"] = decoded_all(files, channels=self.channels, size=self.size)
        return values


def class_numbers(values: NDArray[Any], classes: Sequence[str]) -> NDArray[np.int64]:
    """Class numbers of targets that are numbers or names of classes."""
    if values.dtype.kind in "iu":
        return values.astype(np.int64)
    number = {name: index for index, name in enumerate(classes)}
    return np.array([number[value] for value in values.tolist()], np.int64)


class HuggingFace(Wrapped):
    """Two columns of the tables in `root`: images, which workers decode, or numbers.

    Raises:
        UserError: `root` is no such folder, a column is missing, or the targets are neither classes nor numbers.
    """

    source = "disk"

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
        self.fractions = {"test": test_fraction, **({} if folds else {"val": val_fraction})}

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
        with reading(self.root):
            if not self.root.is_dir():
                raise UserError(f"{where} does not exist. Set data.root=<folder that save_to_disk has written>.")
            try:
                saved: Any = datasets.load_from_disk(str(self.root))
            except FileNotFoundError:
                raise UserError(
                    f"{where} is not a folder written by `save_to_disk`. Run dataset.save_to_disk({str(self.root)!r}) in Python, or set data.root=<folder>."
                ) from None
        by_name = saved if isinstance(saved, dict) else {"train": saved}
        names = part_names(by_name, where)
        tables = {part: by_name[names[part]] for part in PARTS if part in names}
        if "train" not in tables:
            raise UserError(f"{where} has no split `train`; it has {', '.join(by_name)}.")
        there = tables["train"].column_names
        for key, column in self.columns.items():
            if column not in there:
                raise UserError(
                    f"data.{key}={column}: there is no such column{did_you_mean(column, there)}; {where} has {', '.join(there)}."
                )
        return tables

    @cached_property
    def names(self) -> dict[str, list[str]]:  # type: ignore[override]
        train, column = self.tables["train"], self.columns["target"]
        feature = train.features[column]
        kind = str(getattr(feature, "dtype", ""))
        if hasattr(feature, "names"):
            return {"classes": list(feature.names)}
        if kind == "string":
            return {"classes": sorted(train.unique(column))}
        if kind.startswith(("int", "uint")):
            return {"classes": [str(number) for number in range(max(train.unique(column)) + 1)]}
        return {"targets": [column]} if kind.startswith("float") else {}

    def prepare(self) -> None:
        """Raises UserError if a target is not a class, such as the -1 of test sets without answers."""
        classes, column = self.names.get("classes", []), self.columns["target"]
        known = {*classes, *range(len(classes))}
        for part, table in self.tables.items() if classes else ():
            if wrong := [value for value in table.unique(column) if value not in known]:
                raise UserError(
                    f"data.root={self.root}: {column}={wrong[0]} of the {part} part is not one of the {len(classes)} classes of train. "
                    "Remove these rows; or remove the part, which is then taken from train."
                )
        super().prepare()

    @cached_property
    def rows(self) -> dict[str, tuple[Any, Indices]]:
        """The table and rows of each part; missing parts are taken from train."""
        train, column = self.tables["train"], self.columns["target"]
        classes = self.names.get("classes")
        strata = class_numbers(train.with_format("numpy")[column][:], classes) if classes else np.zeros(len(train), int)
        fractions = {part: fraction for part, fraction in self.fractions.items() if part not in self.tables}
        part_N = divided(np.full(len(train), "train"), strata, fractions)
        whole = {part: (table, np.arange(len(table))) for part, table in self.tables.items()}
        return whole | {part: (train, np.flatnonzero(part_N == part)) for part in ("train", *fractions)}

    def open_part(self, part: str) -> Rows | None:
        import datasets

        if part not in self.rows:
            return None
        table, places = self.rows[part]
        if not len(places):
            raise UserError(f"data.root={self.root}: the {part} part has no rows. Add some.")
        table = table.select_columns(list(self.columns.values()))
        images = [column for column, feature in table.features.items() if isinstance(feature, datasets.Image)]
        for column in images:
            table = table.cast_column(column, datasets.Image(decode=False))
        numbers = [column for column in table.column_names if column not in images]
        table = table.with_format("numpy", columns=numbers, output_all_columns=True)
        return Rows(table, self.columns, places, self.names, channels=self.channels, size=self.image_size)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the Arrow files, which are read once per machine, and of the columns and rows that are used."""
        files = sorted(self.root.rglob("*.arrow"))
        folder = self.cache / key_of("huggingface", files)
        content = decoded(folder, lambda: ({}, {"sha256": [hash_of(path, "sha256") for path in files]})).extra
        rows = {part: rows.tobytes() for part, (_, rows) in self.rows.items()}
        return hashlib.sha256(repr((content["sha256"], self.columns, self.names, rows)).encode()).hexdigest()
