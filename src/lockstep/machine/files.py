"""Writes files whole or not at all. Free of torch."""

import csv
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lockstep.errors import UserError

PROBE_BYTES = 2**16


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the operating system within the block name `path`: an error of a write names no file."""
    try:
        yield
    except OSError as e:
        e.filename = e.filename or str(path)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a new file, which replaces `path` when the block ends without an error; or of a new folder.

    A reader sees the old file or the new one, never a part of it. A kill leaves `<name>.part`, which the next write removes.
    """
    part = part_of(path)
    remove(part)
    try:
        with naming(path):
            yield part
            take_place(part, path)
    except BaseException:
        remove(part)
        raise


def part_of(path: Path) -> Path:
    """Where a file or a folder is written before it takes its name."""
    return path.with_name(f"{path.name}.part")


def take_place(part: Path, path: Path) -> None:
    """Moves the file or the folder `part` to `path`.

    A file replaces a file atomically. A folder cannot: for an instant only `<path>.old` exists, which checkpoints/finding.py looks
    for.
    """
    if not part.is_dir() and not path.is_dir():
        part.replace(path)
        return
    old = path.with_name(f"{path.name}.old")
    if path.exists():
        remove(old)  # left by a kill
        path.rename(old)
    part.rename(path)
    remove(old)


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def refuse_unwritable(folder: Path, key: str) -> None:
    """Raises UserError if files could not be written into `folder`, which need not exist. Leaves nothing there."""
    place = existing = folder.expanduser().absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        for part in place.relative_to(existing).parts:
            with suppress(FileNotFoundError):
                os.lstat(existing / part)  # raises for a name that is too long
        place = existing
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as e:
        raise UserError(
            f"{key}: {place} cannot be written: {e.strerror}. Type {key}=<a folder with room that is yours>."
        ) from None


def write_text(path: Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")  # names of files may be no UTF-8


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """A table with a heading. What a row lacks is empty, and what has no column is left out."""
    with replacing(path) as part, part.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps({key: finite(value) for key, value in content.items()}, indent=1) + "\n")


def finite(value: Any) -> Any:
    """NaN and infinities as null, which is valid JSON."""
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
