"""Lists image files: of folders, of class folders with parts, of globs and CSVs. Free of torch."""

import csv
import glob
import io
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from lockstep.data.pixels import ENDINGS, JUNK, Walk, spelled
from lockstep.data.sampler import PARTS
from lockstep.errors import UserError, did_you_mean, explained, raise_problems
from lockstep.machine.files import read_bytes

# --- Lists image files: below a folder, of a glob, of a CSV ---

LISTS = (".csv", ".tsv", ".txt")  # endings of lists of files
SHOWN = 10  # lines or files that a message lists
PART_NAMES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test", "testing": "test"}  # fmt: skip
NONE, YEAR, ANY = "$^", r"[ _-]?\d{4}$", r"^\d+[ _-]|[ _-]?\d{4}$"  # around a part's name: 01_train, train2017
Row = dict[str, str]  # cells by column
Check = Callable[[int, Row], str | None]


@lru_cache(10_000)
def part_of(name: str, around: str = ANY) -> str | None:
    """The part that is meant by the name of a folder, a split or a cell, with such numbers `around` it."""
    core = re.sub(rf"^seg[ _-]|[ _-]?(set|data|images?)$|{around}", "", name.strip().lower())  # seg_test, test_set
    return PART_NAMES.get(core)


def part_names(names: Iterable[str], where: str) -> dict[str, str]:
    """Those of `names` that mean a part, by the part. Raises UserError: two of them mean the same one.

    Years count beside no exact name (train, train2017), numbers only if all have them (01_train, 02_test; not the classes 0-train, 1-bus).
    """
    exact = {name: part_of(name, NONE) for name in names}
    around = ANY if all(map(part_of, exact)) else YEAR
    by_part: dict[str, str] = {}
    for name in exact:
        part = exact[name] or part_of(name, around)
        if part in by_part and (exact[name] or part not in exact.values()):
            raise UserError(f"{where} has {by_part[part]} and {name}, which are both the {part} part. Merge them.")
        by_part |= {part: name} if part and (exact[name] or part not in exact.values()) else {}
    return by_part


def reading(root: Path) -> AbstractContextManager[None]:
    """Raises UserError in place of OSError for what is below data.root."""
    return explained(f"data.root={root} cannot be read", "Make it readable, or set data.root=<another folder>.")


def read_csv(path: Path, needed: Sequence[str], others: str, check: Check) -> list[Row]:
    """The rows of a CSV with a column `path`, separated by commas, semicolons or tabs. Blank lines are skipped.

    `check` gets the line and the cells of a row, may change them, and returns what is wrong with it.

    Raises:
        UserError: it is no CSV, it lacks a column or rows, or rows are wrong.
    """
    line, rows, problems = 0, list[Row](), list[str]()
    try:
        content = read_bytes(path, follows=True)
        text, separators = content.decode("utf-8-sig"), "\t" if path.suffix.lower() == ".tsv" else ",;\t"
        separator = next((each for each in separators if each in text.partition("\n")[0]), ",")
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        columns = reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
        line = reader.line_num
        if missing := [name for name in needed if columns.count(name) != 1]:
            raise UserError(
                f"{path} has no column {' and no column '.join(missing)}; it has {', '.join(columns) or 'none'}. Its first line must name the columns, each once: {','.join(needed)} or {others}."
            )
        for row in reader:
            line = reader.line_num
            if problem := row_problem(path.parent, row) or check(line, row):
                problems.append(f"{path}, line {line}: {problem}")
            rows.append(row)
    except (csv.Error, UnicodeDecodeError, OSError) as e:
        line = content.count(b"\n", 0, e.start) if isinstance(e, UnicodeDecodeError) else line
        raise UserError(f"{path}, line {line + 1}: not a CSV in UTF-8 ({e}). Repair it, or pass another.") from None
    if not rows:
        raise UserError(f"{path} lists no images below its first line.")
    raise_problems(problems[:SHOWN] + [f"{len(problems) - SHOWN:,} more lines are wrong."] * (len(problems) > SHOWN))
    return rows


def row_problem(base: Path, row: dict[Any, Any]) -> str | None:
    """What is wrong with a row. Its path becomes that on this disk: with / for the \\ of Windows, without spaces around it, in either
    Unicode form.
    """
    if None in row or None in row.values():
        return f"it has {'more' if None in row else 'fewer'} cells than the first line. Put a text with a separator into quotes, and write 1.5 with a point."
    if not row["path"].strip("\0 ") or "\0" in row["path"]:
        return "a row needs a path. Add it, or remove the line."
    plain = row["path"].strip().replace("\\", "/")
    forms = [row["path"], plain, *(unicodedata.normalize(form, plain) for form in ("NFC", "NFD"))]
    row["path"] = next((each for each in forms if os.path.lexists(base / each)), plain)
    return None


@dataclass(frozen=True)
class Listing:
    """Image files in the order of their rows. `paths` are relative to `base` or absolute."""

    base: Path
    paths: list[str]
    targets: list[str] = field(default_factory=list)  # class names, or the cells of a CSV; empty without
    parts: list[str] = field(default_factory=list)  # of a data set; one without parts of its own has `train` only
    left_out: str = ""  # what else lies there


def find_inputs(given: str, endings: tuple[str, ...] = ENDINGS, unit: str = "images", check: Check | None = None) -> Listing:  # fmt: skip
    """The files of a folder (with all below it), a glob, a CSV with a column `path` (a TSV has tabs), or one file.

    `check` is that of `read_csv`.

    Raises:
        UserError: there is no such thing, it holds no files with these `endings`, or it cannot be read.
    """
    path, left_out = Path(given).expanduser(), ""
    with explained(f"input={given} cannot be read", "Make it readable, or pass another folder or file."):
        if path.is_file() and path.suffix.lower() in LISTS and not path.name.lower().endswith(endings):
            rows = read_csv(path, ("path",), "path,target", check or (lambda *_: None))
            targets = [row["target"] for row in rows if "target" in row]
            return Listing(path.parent, [row["path"] for row in rows], targets)
        if path.is_file():
            return Listing(Path(), [str(path)])
        if path.is_dir():
            named = f"{unit} (files that end in {', '.join(endings)})" if all(endings) else "files"
            found = Walk([str(path)], endings)
            names, left_out, empty = list(found), str(found), f"holds no {named}"
        elif any(letter in given for letter in "*?["):
            matches = glob.iglob(str(path), recursive=True)  # noqa: PTH207  # Path.glob refuses absolute ones
            names, empty = sorted(name for name in matches if Path(name).is_file()), "matches no file"
        else:
            raise UserError(
                f"input={given} does not exist. Pass a folder of {unit}, a glob in quotes, a CSV with a column path, one file, or a part of the run's own data: {', '.join(PARTS)}."
            )
    if not names:
        raise UserError(f"input={given} {empty}{left_out and f'; it has {left_out}'}. Pass another folder or file.")
    return Listing(Path(), names, left_out=left_out)


# --- Lists image files with their targets and parts ---

SEPARATORS = re.compile(r"\s*[|;]\s*")  # of labels in a cell
# Folds, people and dates
GROUP = re.compile(r"(fold|batch|split|part|session|subject|patient|group|run)[ _-]?\d+|\d{4}[\d._-]*", re.I)
MISSING = {"nan", "NaN", "NaT", "NA", "<NA>", "N/A", "n/a", "#N/A", "null", "NULL", "None"}  # as tables write it


def target_problem(text: str, kind: str) -> str | None:
    """Why a cell is no target of this kind; None if it is one."""
    if kind == "class" and not text:
        return "a row needs a target. Add it, or remove the line."
    if kind != "number" and not MISSING.isdisjoint(SEPARATORS.split(text) if kind == "labels" else (text,)):
        return f"target={text} is how tables write a missing value. Correct it, or remove the line; a class of this name needs another, such as none."
    with suppress(ValueError):
        if kind != "number" or ("_" not in text and abs(float(text)) <= 3.4e38):  # float32 has no more, and NaN is not
            return None
    return f"target={text} is not a number, such as 1.5. Repair the line; for classes, set data.target=class."


def folders(root: Path) -> list[str]:
    """Names of the folders in `root`, without junk."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not JUNK.match(path.name))


def part_tops(root: Path) -> dict[str, Path]:
    """The folder that holds the classes of each part, train first; `root` if it has no parts. Raises UserError: it has no train."""
    by_part = part_names(folders(root), f"data.root={root}")
    if by_part and "train" not in by_part:
        raise UserError(
            f"data.root={root} has {'/, '.join(by_part.values())}/ but no train/. Move the other classes into {root / 'train'}."
        )
    tops = {"train": root} | {part: root / name for part, name in by_part.items()}
    # archives may repeat the name: seg_train/seg_train/<class>
    inside = {part: top / folders(top)[0] for part, top in tops.items() if len(folders(top)) == 1}
    return tops | {part: top for part, top in inside.items() if part_of(top.name) == part}


def class_folders(root: Path) -> Listing:
    """Lists `root/<class>/...` or `root/train/<class>/...`, with or without `val` and `test` beside `train`.

    Raises:
        UserError: there are no classes, or only one; a class or a part has no images; a part has a class that `train` lacks; or it is not
            clear which folders are the classes.
    """
    if not root.is_dir():
        raise UserError(
            f"data.root={root} {'is a file' if root.exists() else 'does not exist'}. Set data.root=<folder with a folder of images per class>."
        )
    root = root.absolute()
    tops = part_tops(root)
    classes = sorted({*map(spelled, folders(tops["train"]))})
    found, listing, problems = Walk(map(str, tops.values())), Listing(root, []), list[str]()
    taken = {top.relative_to(root).parts[0] for top in tops.values() if top != root}
    found.left_out.update(f"{name}/" for name in folders(root) if taken and name not in taken)
    for part, top in tops.items():
        inside = {name: Counter[str]() for name in folders(top)}  # images by the first folder in each class
        for place, files in found.files[str(top)].items():
            name, _, below = place[len(str(top)) + 1 :].partition(os.sep)
            if not name:
                found.left_out += Counter({"images outside of class folders": len(files)})
                continue
            inside[name][below.partition(os.sep)[0]] += len(files)
            listing.paths.extend([f"{place[len(str(root)) + 1 :]}{os.sep}{file}" for file in files])
            listing.targets.extend([spelled(name)] * len(files))
            listing.parts.extend([part] * len(files))
        problems += part_problems(part, top, classes, inside)
        problems += nested_problems(top, inside) if top == root else ()
    raise_problems(problems)
    return Listing(root, listing.paths, listing.targets, listing.parts, str(found))


def part_problems(part: str, top: Path, classes: Sequence[str], inside: dict[str, Counter[str]]) -> Iterator[str]:
    """What is wrong with the folders in `top`. Each has the number of images in itself (by "") and in each folder in it."""
    if part == "train" and len(classes) < 2:
        there = f"only the folder {classes[0]}/" if classes else "no folders"
        yield f"{top} has {there}. It needs a folder of images per class, for two or more classes: {top}/<class>/<image>. For a list of files and targets, set data.csv=<file>."
    if part != "train" and not any(images.total() for images in inside.values()):
        yield f"{top} has no images in class folders. Sort some into {top}/<class>/, or move the folder out of data.root."
    for name, images in inside.items():
        if spelled(name) not in classes:
            yield f"{top / name}: train/ has no class {name}{did_you_mean(spelled(name), classes)}. Rename or remove the folder."
        elif not images.total() and part == "train" and len(classes) > 1:
            yield f"{top / name} holds no images (files that end in {', '.join(ENDINGS)}) of its own. Remove it, or set data.root=<the folder that contains the class folders>."


def nested_problems(top: Path, inside: Mapping[str, Counter[str]]) -> Iterator[str]:
    """Whether the folders in the folders in `top` may be the classes: each of these holds them, or is called like a fold or a person."""
    count = Counter(name for images in inside.values() for name in +images if name)
    shared = sorted(name for name in count if count[name] > 1)
    outer, inner = (all(map(GROUP.fullmatch, names)) for names in (inside, shared))
    divided = (outer or all(map(str.isdigit, inside))) and all(2 * of[""] < of.total() for of in inside.values())
    are_alike = all({*+images} == {*shared} for images in inside.values())
    if len(shared) > 1 and (outer or not inner) and (divided or are_alike):  # cat/batch1 is one of the class cat
        yield f"the folders of {top} hold the same folders, {', '.join(shared[:SHOWN])}: which are the classes? Name folders of parts train/, val/ and test/, with the classes in them, or list the files in a CSV: data.csv=<file>."


def from_csv(path: Path, kind: str = "class") -> Listing:
    """Lists the files of a CSV with the columns path, target and optionally split; paths are relative to the CSV.

    Raises:
        UserError: there is no such file, or lines are wrong: a path leads out of its folder or has different targets or splits, a target is
            not of its `kind`, a split has an unknown name.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist. data.csv is a file in data.root: set data.root=<folder>.")
    base, first = path.parent.absolute(), dict[str, tuple[int, str, str, str]]()  # by the real file
    parts = list[str]()

    def check(line: int, row: Row) -> str | None:
        given, split = Path(row["path"]), row.get("split", "train").strip()
        if not (base / given).is_relative_to(base) or ".." in given.parts:
            return f"path={given} leads out of {path.parent}. Paths are relative to the CSV's folder."
        if (part := part_of(split)) is None:
            return f"split={split} is unknown; use one of {', '.join(PARTS)}."
        target = spelled(row["target"].strip())
        known = first.setdefault(os.path.realpath(base / given), (line, given.as_posix(), target, part))
        row |= {"path": known[1], "target": target}
        parts.append(part)
        if known[2:] != (target, part):
            return f"{given} is also in line {known[0]}, with a different target or split. Remove one of them."
        return target_problem(row["target"], kind)

    rows = read_csv(path, ("path", "target"), "path,target,split", check)
    for column in rows[0] if "split" not in rows[0] else ():
        if all(part_of(row[column]) for row in rows) and len({part_of(row[column]) for row in rows}) > 1:
            raise UserError(f"{path}: the column {column} has names of parts. Call it split, or rename its values.")
    if "train" not in parts:
        raise UserError(f"{path} has no row with split=train.")
    return Listing(path.parent, [row["path"] for row in rows], [row["target"] for row in rows], parts)
