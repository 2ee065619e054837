"""Lists the image files that `input=` of predict.py names. Free of torch and NumPy."""

import csv
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.data.listing import ENDINGS, PART_NAMES
from lockstep.errors import UserError

PARTS = tuple(dict.fromkeys(PART_NAMES.values()))
WILD = "*?["


@dataclass(frozen=True)
class Inputs:
    """Image files in the order of their rows: `names` as the table shows them, relative to `base` or absolute."""

    base: Path
    names: list[str]
    targets: list[str] | None = None  # the cells of a CSV


def is_part(given: str) -> bool:
    return given in PARTS


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


def images_below(folder: Path) -> Iterator[str]:
    """Image files sorted by name, those of a folder before those of the folders in it. Hidden ones are left out."""
    for place, below, names in os.walk(folder, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            if name.lower().endswith(ENDINGS) and not name.startswith("."):
                yield f"{place}{os.sep}{name}"


def from_csv(path: Path) -> Inputs:
    """The column `path`, relative to the CSV's folder, and the column `target` if there is one."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            columns = reader.fieldnames or []
            if "path" not in columns:
                raise UserError(
                    f"input={path} has no column path; it has {', '.join(columns) or 'none'}. Its first line must name the columns: path or path,target."
                )
            names, targets = [], []
            for row in reader:
                names.append(row["path"] or "")
                targets.append((row.get("target") or "").strip())
    except (csv.Error, UnicodeDecodeError, OSError) as e:
        raise UserError(f"input={path} is not a CSV file in UTF-8 ({e}). Type another file.") from None
    if not names:
        raise UserError(f"input={path} lists no images below its first line.")
    return Inputs(path.parent, names, targets if "target" in columns else None)
