"""Your own image files: a folder per class, or a CSV of paths and targets. Free of torch."""

import csv
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.config.words import nearest
from lockstep.data.cache import Cached, Parts, cache_folder, decoded, key_of
from lockstep.data.dataset import Arrays
from lockstep.data.images import Files, Images, read_all, scratch, shown
from lockstep.data.sampler import PARTS, divided, taken_from_train
from lockstep.errors import UserError, raise_problems

# --- Parses targets from CSV cells or folder names into numbers. Free of torch ---

# N sample · L label


KINDS = ("class", "labels", "number")
SEPARATORS = re.compile(r"[|;]")


def labels_of(text: str) -> list[str]:
    """Splits a cell with several labels: `red|round` or `red;round`."""
    return [label for part in SEPARATORS.split(text) if (label := part.strip())]


def names_of(texts: Sequence[str], kind: str, where: str) -> list[str]:
    """The names of classes or labels, in the order of their numbers; empty for numbers. Raises UserError if there is only one."""
    if kind == "number":
        return []
    different = set(texts)
    names = sorted({label for text in different for label in labels_of(text)} if kind == "labels" else different)
    if len(names) < 2:
        raise UserError(f"{where} has only one {kind}, {', '.join(names)}: there is nothing to learn.")
    return names


def targets_of(texts: Sequence[str], kind: str, names: Sequence[str], where: str) -> NDArray[Any]:
    """Class numbers; for `labels`, 0 or 1 per label; for `number`, one number."""
    place = {name: number for number, name in enumerate(names)}
    if kind == "class":
        return np.array([place[text] for text in texts], np.int64)
    if kind == "labels":
        target_NL = np.zeros((len(texts), len(place)), np.float32)
        for row, text in zip(target_NL, texts, strict=True):
            row[[place[label] for label in labels_of(text)]] = 1
        return target_NL
    return np.array([[number(text, f"{where}, line {line}")] for line, text in enumerate(texts, 2)], np.float32)


def number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        raise UserError(f"{where}: target={text} is not a number. Type data.target=class, or repair the line.")
    return value


# --- Lists image files with their targets and parts. Free of torch and Pillow ---

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


# --- Your own image files: a folder per class, or a CSV of paths and targets. Free of torch ---

# N file


CACHE_BYTES = 2 * 2**30  # decode=auto caches up to this size of decoded images
SHOWN = 10  # broken files that a message lists


class Folder(Images):
    """Images of any size, resized to `image_size` when decoded: once into the cache, or by workers in every epoch.

    Raises:
        UserError: the folder or the CSV has a mistake, or files are broken.
    """

    def __init__(
        self,
        *,
        root: str,
        csv: str | None = None,
        target: str = "class",
        decode: str = "auto",
        skip_broken: bool = False,
        test_fraction: float = 0.1,
        val_fraction: float = 0.1,
        folds: int | None = None,
        cache_dir: str | None = None,
        **images: Any,
    ) -> None:
        super().__init__(**images)
        self.root, self.csv, self.kind, self.asked = Path(root).expanduser(), csv, target, decode
        self.skip_broken, self.cache = skip_broken, cache_folder(cache_dir)
        self.fractions = taken_from_train(test=test_fraction, val=val_fraction, folds=folds)

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        yield from super().problems(data)
        if (kind := data.get("target")) not in KINDS:
            yield f"data.target={kind} is unknown; use one of {', '.join(KINDS)}{nearest(str(kind), list(KINDS))}."
        elif kind != "class" and data.get("csv") is None:
            yield f"data.target={kind} needs a list of files and targets. Type data.csv=<file> as well, or data.target=class."

    # --- files, targets and splits ---

    @cached_property
    def listing(self) -> Listing:
        return class_folders(self.root) if self.csv is None else from_csv(self.root / Path(self.csv).expanduser())

    @cached_property
    def names(self) -> list[str]:
        """The names of classes or labels, in the order of their numbers."""
        return names_of(self.listing.targets, self.kind, self.where)

    @property
    def where(self) -> str:
        return f"data.root={self.root}" if self.csv is None else f"data.csv={self.csv}"

    @cached_property
    def targets(self) -> NDArray[Any]:
        return targets_of(self.listing.targets, self.kind, self.names, self.where)

    @cached_property
    def parts(self) -> NDArray[np.str_]:
        """The part of each file. Broken files are assigned too, so skipping them does not move other files."""
        parts, targets = np.array(self.listing.parts), self.targets
        strata = targets if self.kind == "class" else np.zeros(len(parts), np.int64)
        parts = divided(parts, strata, self.fractions)
        for part in ("train", *self.fractions):
            if not (parts == part).any():
                raise UserError(
                    f"{self.where} has {len(parts)} images: too few for a {part} part. Add images, or put some into {part}/."
                )
        if self.kind == "class" and (lost := set(targets) - set(targets[parts == "train"])):
            raise UserError(
                f"{self.where}: no training image of class {self.names[min(lost)]}. Add some, or remove the class."
            )
        return parts

    # --- content ---

    @cached_property
    def in_cache(self) -> bool:
        size = len(self.listing.paths) * self.channels * self.image_size**2
        return self.asked == "cache" or (self.asked == "auto" and size <= CACHE_BYTES)

    def key(self) -> str:
        """Key of the cache: files by name, size and time, their targets, and the size they are decoded to."""
        listing, digest = self.listing, hashlib.sha256()
        for path, target, part in zip(listing.paths, listing.targets, self.parts, strict=True):
            try:
                stat = (listing.base / path).stat()
                digest.update(repr((path, target, str(part), stat.st_size, stat.st_mtime_ns)).encode())
            except OSError:
                digest.update(repr((path, target, str(part))).encode())
        decoding = (self.channels, self.image_size) if self.in_cache else ()
        return key_of("folder", [], str(listing.base.resolve()), self.kind, decoding, digest.hexdigest())

    @cached_property
    def cached(self) -> Cached:
        """Reads every file once per machine. Raises UserError that lists the broken ones."""
        found = decoded(self.cache / self.key(), self.read)
        broken: dict[str, str] = found.extra()["broken"]
        if broken and not self.skip_broken:
            lines = [f"\n  {path}: {why}" for path, why in list(broken.items())[:SHOWN]]
            more = f"\n  and {len(broken) - SHOWN:,} more" if len(broken) > SHOWN else ""
            raise UserError(
                f"{len(broken):,} of {len(self.listing.paths):,} image files cannot be read:{''.join(lines)}{more}\n"
                "Repair or remove them, or type data.skip_broken=true to train without them."
            )
        return found

    def read(self) -> tuple[Parts, dict[str, Any]]:
        """Reads all files; returns the arrays of each part if images go into the cache."""
        digest, parts, broken = hashlib.sha256(repr(self.names).encode()), Parts(), dict[str, str]()
        for part in (each for each in PARTS if (self.parts == each).any()):
            places = np.flatnonzero(self.parts == part)
            shape = (len(places), self.channels, self.image_size, self.image_size)
            rows, good = scratch(self.cache, shape) if self.in_cache else None, np.ones(len(places), bool)
            paths = [self.listing.paths[place] for place in places]
            results = read_all(self.listing.base, paths, channels=self.channels, size=self.image_size, image_NCHW=rows)
            for row, (sha, problem) in enumerate(shown(results, f"reading {part} images", len(paths))):
                good[row] = problem is None
                if problem is None:
                    path = Path(paths[row]).as_posix()
                    digest.update(repr((part, path, self.listing.targets[places[row]])).encode() + sha)
                else:
                    broken[paths[row]] = problem
            if rows is not None:
                parts[f"{part}/input"] = rows if good.all() else rows[good]
                parts[f"{part}/target"] = self.targets[places[good]]
        return parts, {"sha256": digest.hexdigest(), "broken": broken}

    def prepare(self) -> None:
        if broken := self.facts["skipped"]:
            self.notice = f"{broken:,} broken image files of {self.where} are left out (data.skip_broken=true)."

    @property
    def facts(self) -> dict[str, Any]:
        return {"skipped": len(self.cached.extra()["broken"])}

    @property
    def fingerprint(self) -> str:  # type: ignore[override]  # of the files, not of the decoded pixels
        return str(self.cached.unchanged().extra()["sha256"])

    @cached_property
    def about(self) -> dict[str, Any]:
        described = {"class": "classes", "labels": "labels", "number": "targets"}[self.kind]
        return {**super().about, described: self.names or ["target"]}

    # --- parts ---

    def readable(self, part: str) -> list[int]:
        """The places of a part's files in the listing, without broken ones."""
        broken = self.cached.extra()["broken"]
        return [int(i) for i in np.flatnonzero(self.parts == part) if self.listing.paths[i] not in broken]

    def paths(self, part: str) -> list[str]:
        return [self.listing.paths[place] for place in self.readable(part)]

    def open_part(self, part: str) -> Arrays | Files | None:
        if not (self.parts == part).any():
            return None
        places = self.readable(part)
        if not places:
            raise UserError(f"{self.where}: all images of the {part} part are broken. Repair some.")
        if self.in_cache:
            return Arrays(**self.cached.arrays(part))
        size = {"channels": self.channels, "size": self.image_size}
        return Files(self.listing.base, self.paths(part), self.targets[places], **size)
