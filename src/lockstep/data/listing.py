"""Lists image files with their targets and parts. Free of torch and Pillow."""

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.words import nearest
from lockstep.errors import UserError, raise_problems

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
PART_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


@dataclass(frozen=True)
class Listing:
    """Image files by their paths below `base`. Without parts of its own, all `parts` are `train`."""

    base: Path
    paths: list[str]
    targets: list[str]  # class names, or the cells of a CSV
    parts: list[str]


def class_folders(root: Path) -> Listing:
    """Lists `root/<class>/...` or `root/train/<class>/...`, with or without `val` and `test` beside `train`.

    Raises:
        UserError: there are no classes, or only one; a class has no images; a part has a class that `train` lacks.
    """
    if not root.is_dir():
        raise UserError(
            f"data.root={root} does not exist. Type data.root=<folder with a folder of images for each class>."
        )
    given = part_names((folder.name for folder in folders(root)), f"data.root={root}")
    if given and "train" not in given:
        others = ", ".join(f"{name}/" for name in given.values())
        raise UserError(f"data.root={root} has {others} but no train/. Move the other classes into {root / 'train'}.")
    listing = Listing(root, [], [], [])
    classes: list[str] = []
    for part, name in sorted(given.items(), key=lambda item: item[0] != "train") or [("train", "")]:
        top = root / name
        found = list(folders(top))
        names = [folder.name for folder in found]
        raise_problems(part_problems(top, names, classes))
        classes = classes or names
        for folder in found:
            add_images(listing, folder, part, optional=part != "train")
    return listing


def part_names(names: Iterable[str], where: str) -> dict[str, str]:
    """Those of `names` that mean a part, by the part. Raises UserError: two of them mean the same one."""
    found: dict[str, str] = {}
    for name in names:
        part = PART_NAMES.get(name.lower())
        if part in found:
            raise UserError(f"{where} has {found[part]} and {name}, which are both the {part} part. Merge them.")
        if part:
            found[part] = name
    return found


def part_problems(top: Path, names: list[str], classes: list[str]) -> Iterator[str]:
    """Problems of the class folders of a part. `classes` are those of `train`, empty for `train` itself."""
    if not classes and len(names) < 2:
        there = f"only the folder {names[0]}/" if names else "no folders"
        yield (
            f"{top} has {there}. It needs a folder of images per class, for two or more classes: {top}/<class>/<image>. "
            "For a list of files and targets, type data.csv=<file>."
        )
    for name in names:
        if classes and name not in classes:
            yield f"{top / name}: train/ has no class {name}{nearest(name, classes)}. Rename or remove the folder."


def folders(root: Path) -> Iterator[Path]:
    """Names of the folders in `root`, without hidden ones such as .ipynb_checkpoints."""
    yield from sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def add_images(listing: Listing, folder: Path, part: str, *, optional: bool) -> None:
    """Adds all image files below `folder`, the folder of a class."""
    found = [path[len(str(listing.base)) + 1 :] for path in images_below(folder)]
    if not found and not optional:
        raise UserError(
            f"{folder} holds no images (files that end in {', '.join(ENDINGS)}). Remove it, or type data.root=<the folder that contains the class folders>."
        )
    listing.paths.extend(found)
    listing.targets.extend([folder.name] * len(found))
    listing.parts.extend([part] * len(found))


def images_below(folder: Path) -> Iterator[str]:
    """Image files sorted by name, those of a folder before those of the folders in it. Hidden ones are left out."""
    for place, below, names in os.walk(folder, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            if name.lower().endswith(ENDINGS) and not name.startswith("."):
                yield f"{place}{os.sep}{name}"


def table(path: Path, needed: Sequence[str], others: str, where: str) -> tuple[Sequence[str], list[dict[str, str]]]:
    """The columns and rows of a CSV (a TSV has tabs). Raises UserError: it is none, it lacks a column, or it has no rows."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            columns, rows = reader.fieldnames or [], list(reader)
    except (csv.Error, UnicodeDecodeError, OSError) as e:
        raise UserError(f"{where} is not a CSV file in UTF-8 ({e}). Replace it, or type another file.") from None
    if missing := [name for name in needed if name not in columns]:
        raise UserError(
            f"{where} has no column {' and no column '.join(missing)}; it has {', '.join(columns) or 'none'}. "
            f"Its first line must name the columns: {','.join(needed)} or {others}."
        )
    if not rows:
        raise UserError(f"{where} lists no images below its first line.")
    return columns, rows


def from_csv(path: Path) -> Listing:
    """Lists the files of a CSV with the columns path, target and optionally split; paths are relative to the CSV.

    Raises:
        UserError: there is no such file, a column is missing, or a split has an unknown name.
    """
    if not path.is_file():
        raise UserError(
            f"{path} does not exist. data.csv is a file in data.root: type data.root=<folder> data.csv=<file>."
        )
    _, rows = table(path, ("path", "target"), "path,target,split", str(path))
    empty = [line for line, row in enumerate(rows, 2) if not (row["path"] or "").strip("\0 ") or "\0" in row["path"]]
    if empty:
        raise UserError(f"{path}, line {empty[0]}: a row needs a path. Add it, or remove the line.")
    parts = [PART_NAMES.get((row.get("split") or "train").strip().lower(), "") for row in rows]
    if "" in parts:
        line = parts.index("")
        raise UserError(
            f"{path}, line {line + 2}: split={rows[line]['split']} is unknown; use one of {', '.join(PART_NAMES)}."
        )
    if "train" not in parts:
        raise UserError(f"{path} has no row with split=train.")
    paths, targets = [row["path"] for row in rows], [(row["target"] or "").strip() for row in rows]
    for line, name in enumerate(paths):
        if not (path.parent / name).absolute().is_relative_to(path.parent.absolute()) or ".." in Path(name).parts:
            raise UserError(
                f"{path}, line {line + 2}: path={name} leads out of {path.parent}. Paths are relative to the CSV's folder."
            )
    return Listing(path.parent, paths, targets, parts)
