"""Lists the image files that `input=` of predict.py names. Free of torch and NumPy."""

import glob
from dataclasses import dataclass
from pathlib import Path

from lockstep.data.listing import ENDINGS, PART_NAMES, images_below, table
from lockstep.errors import UserError

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
