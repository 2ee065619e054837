"""What predictions are made of and written to: image files, and tables as CSV, JSON, JSON lines or Parquet. Free of torch."""

import csv
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.dataset import Indices
from lockstep.data.images import Files, Images, Listing
from lockstep.data.pixels import original_size
from lockstep.errors import UserError
from lockstep.machine.files import finite

# --- Image files to predict ---

NEEDED = ("image_size", "channels", "mean", "std")  # in the `about` of the training data


class InputFiles(Files):
    """Files to predict. `problem` says why a file could not be read: its image is then black."""

    def __init__(self, inputs: Listing, *, channels: int, size: int) -> None:
        targets = np.array([os.fsencode(text) for text in inputs.targets]) if inputs.targets else None
        super().__init__(inputs.base, inputs.paths, targets, channels=channels, size=size)

    def __getitem__(self, indices: Indices) -> dict[str, Any]:
        problems = [""] * len(indices)
        return {"input": self.decoded(indices, problems), "problem": problems}

    def original_size(self, index: int) -> tuple[int, int]:
        """Width and height of a file, from its header."""
        from PIL import Image

        with Image.open(self.base / self.name(index)) as image:
            return original_size(image)

    def target(self, index: int) -> str | None:
        return None if self.target_N is None else os.fsdecode(self.target_N[index])

    @property
    def fingerprint(self) -> str:
        """Of the list of files, to see that all processes have the same one."""
        return hashlib.sha256(self.name_N.tobytes()).hexdigest()


class ImageFiles(Images):
    """Files to predict, with the description and the normalisation of the data that the network was trained on.

    Raises:
        UserError: it was not trained on images.
    """

    def __init__(
        self, inputs: Listing, *, about: Mapping[str, Any], network: Mapping[str, Any], channels_last: bool
    ) -> None:
        if missing := [key for key in NEEDED if not about.get(key)]:
            raise UserError(
                f"input: files can be read only for a network that was trained on images with {', '.join(NEEDED)} in the `about` of their "
                f"data; {', '.join(missing)} is not there. Pass input=test, or val or train: a part of the run's own data."
            )
        super().__init__(channels_last=channels_last, **{key: about[key] for key in ("image_size", "mean", "std")})
        self.about, self.network = dict(about), dict(network)
        self.train = self.val = self.test = InputFiles(inputs, channels=self.channels, size=self.image_size)

    def network_arguments(self) -> dict[str, Any]:
        return self.network


# --- Tables as files. Rows are written as they come, so memory does not grow ---

Row = dict[str, Any]
CHUNK = 10_000  # rows of a Parquet row group


def write_table(path: Path, ending: str, example: Row, rows: Iterator[Row]) -> None:
    """Writes `rows` to `path` in the format of `ending`, with the columns of `example`; those that a row lacks are empty there."""
    WRITERS[ending](path, example, ({name: row.get(name) for name in example} for row in rows))


def text(value: Any) -> Any:
    """A CSV cell; lists as the CSV of a multilabel data set has them."""
    return "|".join(map(str, value)) if isinstance(value, list) else value


def write_csv(path: Path, example: Row, rows: Iterator[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(example)
        writer.writerows([text(value) for value in row.values()] for row in rows)


def line(row: Row) -> str:
    return json.dumps({name: finite(value) for name, value in row.items()})


def write_jsonl(path: Path, _: Row, rows: Iterator[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line(row)}\n" for row in rows)


def write_json(path: Path, _: Row, rows: Iterator[Row]) -> None:
    """A list of objects, one a line."""
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            file.write(f"{',' if number else '['}\n{line(row)}")
        file.write("\n]\n")


def write_parquet(path: Path, example: Row, rows: Iterator[Row]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = list(itertools.islice(rows, CHUNK))
    schema = pa.schema([(name, kind(pa, [row[name] for row in (example, *first)])) for name in example])
    with pq.ParquetWriter(path, schema) as writer:
        while first:
            readable = [{name: as_utf8(value) for name, value in row.items()} for row in first]
            writer.write_table(pa.Table.from_pylist(readable, schema))
            first = list(itertools.islice(rows, CHUNK))


def as_utf8(value: Any) -> Any:
    """A file's name may be no UTF-8, which Parquet asks for."""
    return value.encode(errors="surrogateescape").decode(errors="replace") if isinstance(value, str) else value


def kind(pa: Any, values: list[Any]) -> Any:
    """The Arrow type of a column; of empty lists or of nothing, that of texts."""
    known = [value for value in values if value is not None and value != []]
    if not known:
        return pa.list_(pa.string()) if [] in values else pa.string()
    return pa.infer_type([as_utf8(value) for value in known])


WRITERS: Mapping[str, Callable[[Path, Row, Iterator[Row]], None]] = {
    ".csv": write_csv,
    ".json": write_json,
    ".jsonl": write_jsonl,
    ".parquet": write_parquet,
}
