"""Lists image files from folders, class folders with parts, globs and CSVs. Does not import torch."""

import csv
import glob
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import UserError, explain_os_error, files, raise_problems, sampler
from lockstep.kit.pixels import ENDINGS, JUNK, Walk, file_name_text

# --- Lists image files of a folder, a glob or a CSV ---

LISTS = (".csv", ".tsv", ".txt")  # endings of files that list other files
SHOWN = 10  # most lines or files in a message
PART_NAMES = {"training": "train", "valid": "val", "validation": "val", "testing": "test"}
NUMBER = re.compile(r"^\d+[ _-]|[ _-]?\d{4}$")  # around the names of parts: 01_train, train2017
Row = dict[str, str]  # cells by column
Check = Callable[[Row], str | None]


def part_of(name: str) -> str | None:
    """The part that the name of a folder, split or cell means."""
    core = re.sub(r"^seg[ _-]|[ _-]?(set|data|images?)$", "", name.strip().lower())  # seg_test, test_set
    return core if core in sampler.PARTS else PART_NAMES.get(core)


def part_names(names: Iterable[str], where: str) -> dict[str, str]:
    """Maps parts to those of `names` that mean them. Raises UserError if two names mean the same part.

    If no name does, numbers are ignored if every name has one: 01_train and 02_test are parts, but 0-train and 1-bus are classes.
    """
    exact = {name: part_of(name) for name in names}
    numbered = {name: part_of(NUMBER.sub("", name)) for name in exact}
    by_part: dict[str, str] = {}
    for name, part in (numbered if all(numbered.values()) and not any(exact.values()) else exact).items():
        if part in by_part:
            raise UserError(f"{where} has {by_part[part]} and {name}, which both mean the {part} part. Merge them.")
        if part:
            by_part[part] = name
    return by_part


def explain_root_error(root: Path) -> AbstractContextManager[None]:
    """Converts an OSError for a file or folder in data.root to a UserError."""
    return explain_os_error(f"data.root={root} cannot be read", "Make it readable, or set data.root=<folder>.")


def read_csv(path: Path, needed: Sequence[str], alternative: str, check: Check) -> dict[str, list[str]]:
    """The columns of a CSV with a column `path`, separated by commas, semicolons or tabs. Skips blank lines.

    Dicts of rows would take five times the memory of the paths. `check` receives the cells of a row. It may change them, and returns an error message or None.

    Raises:
        UserError: the file is not a CSV, has no rows or lacks a column, or rows are invalid.
    """
    line, problems = 0, list[str]()
    try:
        content = files.read_bytes(path, follows=True)
        first = content.decode("utf-8-sig").partition("\n")[0]
        separators = "\t" if path.suffix.lower() == ".tsv" else ",;\t"
        separator = next((each for each in separators if each in first), ",")
        lines = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="")
        reader = csv.DictReader(lines, delimiter=separator, strict=True)
        columns = reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
        line = reader.line_num
        if missing := [name for name in needed if columns.count(name) != 1]:
            raise UserError(
                f"{path} has no column {' and no column '.join(missing)}; it has {', '.join(columns) or 'none'}. Its first line must name the columns, each once: {','.join(needed)} or {alternative}."
            )
        table: dict[str, list[str]] = {name: [] for name in columns}
        for row in reader:
            line = reader.line_num
            if problem := row_problem(path.parent, row) or check(row):
                problems.append(f"{path}, line {line}: {problem}")
            for name, cells in table.items():
                cells.append(row[name])
    except (csv.Error, UnicodeDecodeError, OSError) as e:
        line = content.count(b"\n", 0, e.start) if isinstance(e, UnicodeDecodeError) else line
        raise UserError(f"{path}, line {line + 1}: not a valid UTF-8 CSV ({e}). Repair or replace it.") from None
    if not table["path"]:
        raise UserError(f"{path} lists no images after its first line.")
    raise_problems(problems[:SHOWN] + [f"{len(problems) - SHOWN:,} more lines have errors."] * (len(problems) > SHOWN))
    return table


def row_problem(base: Path, row: dict[Any, Any]) -> str | None:
    """What is wrong with a row. Strips its path, and replaces the \\ of Windows by / unless the file exists."""
    if None in row or None in row.values():
        return f"it has {'more' if None in row else 'fewer'} cells than the first line. Quote text with separators, and write decimals with a point."
    row["path"] = path = row["path"].strip()
    if not path or "\0" in path:
        return "a row needs a path. Add it, or remove the line."
    row["path"] = path if os.path.lexists(base / path) else path.replace("\\", "/")
    return None


@dataclass(frozen=True)
class Listing:
    """Image files in row order. `paths` are absolute or relative to `base`."""

    base: Path
    paths: list[str]
    targets: list[str] = field(default_factory=list)  # class names, or the cells of a CSV; may be empty
    parts: list[str] = field(default_factory=list)  # of a data set; only `train` if it defines no parts
    left_out: str = ""  # the files and folders that are ignored


def find_inputs(source: str, endings: tuple[str, ...] = ENDINGS, unit: str = "images", check: Check = lambda _: None, key: str = "input") -> Listing:  # fmt: skip
    """The files of a folder (recursively), a glob, a CSV or TSV with a column `path`, or a single file.

    `check` is passed to `read_csv`. `key`: what names the source, in messages.

    Raises:
        UserError: the input does not exist, cannot be read, or has no files with these `endings`.
    """
    path, left_out = Path(source).expanduser(), ""
    with explain_os_error(f"{key}={source} cannot be read", "Make it readable, or pass a different folder or file."):
        if path.is_file() and path.suffix.lower() in LISTS and not path.name.lower().endswith(endings):
            table = read_csv(path, ("path",), "path,target", check)
            return Listing(path.parent, table["path"], table.get("target", []))
        if path.is_file():
            return Listing(Path(), [str(path)])
        if path.is_dir():
            walk = Walk([str(path)], endings)
            names, left_out = list(walk), str(walk)
        elif glob.has_magic(source):
            matches = glob.iglob(str(path), recursive=True)  # noqa: PTH207  # Path.glob rejects absolute patterns
            names = sorted(name for name in matches if Path(name).is_file())
        else:
            raise UserError(
                f"{key}={source} does not exist. Pass a folder of {unit}, a glob in quotes, a CSV with a column path, a single file or a part of the run's own data, such as test."
            )
    if not names:
        raise UserError(f"{key}={source} has no {unit}{left_out and f', but {left_out}'}. Pass a different one.")
    return Listing(Path(), names, left_out=left_out)


# --- Lists image files with targets and parts ---

SEPARATORS = re.compile(r"\s*[|;]\s*")  # of labels in a cell
# Names of folds, people and dates
GROUP = re.compile(r"(fold|batch|split|part|session|subject|patient|group|run)[ _-]?\d+|\d{4}[\d._-]*", re.I)
MISSING = {"nan", "NaN", "NaT", "NA", "<NA>", "N/A", "n/a", "#N/A", "null", "NULL", "None"}  # a missing value in tables


def target_problem(text: str, kind: str) -> str | None:
    """Why a cell is not a target of this kind; None if it is one."""
    if kind == "class" and not text:
        return "a row needs a target. Add it, or remove the line."
    if kind != "number" and not MISSING.isdisjoint(SEPARATORS.split(text) if kind == "labels" else (text,)):
        return f"target={text} looks like a missing value. Correct it, or remove the line. Rename a class with this name, for example to none."
    with suppress(ValueError):
        if kind != "number" or ("_" not in text and abs(float(text)) <= 3.4e38):  # the range of float32; false for NaN
            return None
    return f"target={text} is not a number, such as 1.5. Correct the line; for classes, set data.target=class."


def folders(root: Path) -> list[str]:
    """The names of the folders in `root`, without junk."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not JUNK.match(path.name))


def part_tops(root: Path) -> dict[str, Path]:
    """The folder with the classes of each part, train first; `root` if it has no parts. UserError without train."""
    by_part = part_names(folders(root), f"data.root={root}")
    if by_part and "train" not in by_part:
        raise UserError(
            f"data.root={root} has {'/, '.join(by_part.values())}/ but no train/. Move the training classes into {root / 'train'}."
        )
    tops = {"train": root} | {part: root / name for part, name in by_part.items()}
    # archives may nest a folder of the same name: seg_train/seg_train/<class>
    inside = {part: top / folders(top)[0] for part, top in tops.items() if len(folders(top)) == 1}
    return tops | {part: top for part, top in inside.items() if part_of(top.name) == part}


def class_folders(root: Path) -> Listing:
    """Lists `root/<class>/...` or `root/train/<class>/...`, optionally with `root/val` and `root/test`.

    Raises:
        UserError: there are fewer than two classes; a class or a part has no images; a part has a class that is not in
            `train`; or it is ambiguous which folders are the classes.
    """
    if not root.is_dir():
        raise UserError(
            f"data.root={root} {'is a file' if root.exists() else 'does not exist'}. Set data.root=<folder with a folder of images per class>."
        )
    root = root.absolute()
    tops = part_tops(root)
    classes = sorted({*map(file_name_text, folders(tops["train"]))})
    walk, listing, problems = Walk(map(str, tops.values())), Listing(root, []), list[str]()
    used = {top.relative_to(root).parts[0] for top in tops.values() if top != root}
    walk.left_out.update(f"{name}/" for name in folders(root) if used and name not in used)
    for part, top in tops.items():
        inside = {name: Counter[str]() for name in folders(top)}  # images by first folder inside the class
        for folder, names in walk.files[str(top)].items():
            name, _, subpath = folder[len(str(top)) + 1 :].partition(os.sep)
            if not name:
                walk.left_out += Counter({"images outside of class folders": len(names)})
                continue
            inside[name][subpath.partition(os.sep)[0]] += len(names)
            listing.paths.extend([f"{folder[len(str(root)) + 1 :]}{os.sep}{file}" for file in names])
            listing.targets.extend([file_name_text(name)] * len(names))
            listing.parts.extend([part] * len(names))
        problems += part_problems(part, top, classes, inside)
        problems += nested_problems(top, inside) if top == root else ()
    raise_problems(problems)
    return Listing(root, listing.paths, listing.targets, listing.parts, str(walk))


def part_problems(part: str, top: Path, classes: Sequence[str], inside: dict[str, Counter[str]]) -> Iterator[str]:
    """Errors of the folders in `top`. `inside`: the number of images directly in each (key "") and in subfolders."""
    if part == "train" and len(classes) < 2:
        yield f"{top} needs one folder of images per class, and at least two classes: {top}/<class>/<image>. For a list of files and targets, set data.csv=<file>."
    if part != "train" and not any(images.total() for images in inside.values()):
        yield f"{top} has no images in class folders. Move some into {top}/<class>/, or move the folder out of data.root."
    for name, images in inside.items():
        if not images.total() and part == "train" and len(classes) > 1:
            yield f"{top / name} contains no images (files that end in {', '.join(ENDINGS)}), not counting links to listed files. Remove it, or set data.root=<the folder that contains the class folders>."


def nested_problems(top: Path, inside: Mapping[str, Counter[str]]) -> Iterator[str]:
    """An error if the classes may be one level deeper: all folders hold the same ones, or are named like folds."""
    names = [{*+images} for images in inside.values()]
    are_alike = len(names) > 1 and len(names[0]) > 1 and "" not in names[0] and all(each == names[0] for each in names)
    shared = sorted(set[str]().union(*names) - {""})
    if are_alike or (shared and all(map(GROUP.fullmatch, inside))):
        yield f"the folders in {top} contain the same folders, {', '.join(shared[:SHOWN])}: it is unclear which are the classes. Move the class folders into train/, val/ and test/, or list the files in a CSV: data.csv=<file>."


def from_csv(path: Path, kind: str = "class") -> Listing:
    """Lists the files of a CSV with the columns path, target and optionally split. Paths are relative to the CSV.

    Raises:
        UserError: the CSV does not exist, or lines are invalid: a path is outside its folder or has different targets
            or splits, a target is not of its `kind`, or a split has an unknown name.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist. data.csv is a file in data.root: set data.root=<folder>.")
    base, parts, seen = path.parent.absolute(), list[str](), dict[str, tuple[str, str, str]]()

    def check(row: Row) -> str | None:
        file, split = Path(row["path"]), row.get("split", "train").strip()
        if not (base / file).is_relative_to(base) or ".." in file.parts:
            return f"path={file} is outside {path.parent}. Paths are relative to the CSV's folder."
        if (part := part_of(split)) is None:
            return f"split={split} is unknown; use one of {', '.join(sampler.PARTS)}."
        target = file_name_text(row["target"].strip())
        first = seen.setdefault(os.path.realpath(base / file), (file.as_posix(), target, part))
        row |= {"path": first[0], "target": target}
        parts.append(part)
        if first[1:] != (target, part):
            return f"{file} is also in an earlier line, with a different target or split. Remove one of them."
        return target_problem(row["target"], kind)

    table = read_csv(path, ("path", "target"), "path,target,split", check)
    for column, cells in table.items() if "split" not in table else ():
        if None not in (found := set(map(part_of, cells))) and len(found) > 1:
            raise UserError(f"{path}: the column {column} has part names. Rename it to split, or rename its values.")
    if "train" not in parts:
        raise UserError(f"{path} has no row with split=train.")
    return Listing(path.parent, table["path"], table["target"], parts)
