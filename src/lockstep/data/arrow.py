"""Rows of a table of Hugging Face's datasets as batches. Free of torch."""

# B batch · C channel · H W pixel

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.decoding import decoded_all
from lockstep.data.samples import Indices


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
