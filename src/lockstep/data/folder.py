"""Your own image files: a folder per class, or a CSV of paths and targets. Free of torch."""

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.cache import Cached, Parts, cache_folder, decoded, key_of, scratch, stamp
from lockstep.data.dataset import Arrays
from lockstep.data.images import SHOWN, Files, Images, Listing, Row, part_names, part_of, read_all, read_csv, reading
from lockstep.data.pixels import BACKGROUND, ENDINGS, JUNK, WHITE_16, Walk, spelled
from lockstep.data.sampler import PARTS, divided
from lockstep.errors import UserError, did_you_mean, raise_problems

# --- Targets from CSV cells or folder names ---

# N sample · L label

TARGETS = {"class": "classes", "labels": "labels", "number": "targets"}  # and where `about` describes them
SEPARATORS = re.compile(r"\s*[|;]\s*")  # of labels in a cell
COPY = re.compile(r" (- copy|\(\d\))$", re.I)  # of a folder, as Windows calls it
# Folds, people and dates
GROUP = re.compile(r"(fold|batch|split|part|session|subject|patient|group|run)[ _-]?\d+|\d{4}[\d._-]*", re.I)
MISSING = {"nan", "NaN", "NaT", "NA", "<NA>", "N/A", "n/a", "#N/A", "null", "NULL", "None"}  # as tables write it


def folded(name: str) -> str:
    """The same for names that look the same: they differ in blanks, characters without width or the Unicode form."""
    return unicodedata.normalize("NFC", " ".join(re.sub("[\u200b\ufeff]", "", name).split()))


def similar(name: str) -> str:
    """The same for names that may be meant as one. Letters as classes have both cases."""
    return COPY.sub("", name).lower() if len(name) > 1 else name


def pairs(names: Sequence[str], key: Callable[[str], str]) -> list[tuple[str, str]]:
    """Those of the names that have the same key; the first ones."""
    known = {key(name): name for name in reversed(names)}
    return [(known[key(name)], name) for name in names if known[key(name)] != name][:SHOWN]


def cell_problems(names: Sequence[str], kind: str, listing: Listing, where: str) -> Iterator[str]:
    """Which names of classes or labels in a CSV are several labels, or numbers."""
    known = {*names}
    for name in names:
        if len(parts := re.split(r" *[|;,] *", name)) > 1 and known.issuperset(parts):
            yield f"{where} has {name!r} beside {' and '.join(map(repr, parts))}. Several labels in a cell need data.target=labels and |, such as {'|'.join(parts)}."
    is_many = kind == "class" and 2 * len(names) > len(listing.targets) > 3 and {*listing.parts} == {"train"}
    if is_many and not any(target_problem(name, "number") for name in names):
        yield f"{where} has {len(names):,} classes for {len(listing.targets):,} images: {', '.join(names[:SHOWN])}. For numbers, set data.target=number."


def encoded(texts: Sequence[str], kind: str, where: str) -> tuple[list[str], NDArray[Any]]:
    """The names of classes or labels, and for each text its class number, 0 or 1 per label, or its number.

    A cell with several labels separates them: `red|round` or `red;round`. Raises UserError: there is only one name.
    """
    if kind == "number":
        return [], np.array([[float(text)] for text in texts], np.float32)
    labels_of = {text: [*filter(None, SEPARATORS.split(text))] if kind == "labels" else [text] for text in texts}
    names = sorted({label for labels in labels_of.values() for label in labels})
    problem = "look the same. Give them one spelling, or names that differ in more."
    raise_problems(f"{where} has {one!r} and {other!r}, which {problem}" for one, other in pairs(names, folded))
    if len(names) < 2:
        raise UserError(f"{where} has only one {kind}, {', '.join(names)}: there is nothing to learn.")
    place = {name: index for index, name in enumerate(names)}
    if kind == "class":
        return names, np.array([place[text] for text in texts], np.int64)
    target_NL = np.zeros((len(texts), len(names)), np.float32)
    for row, text in zip(target_NL, texts, strict=True):
        row[[place[label] for label in labels_of[text]]] = 1
    return names, target_NL


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


# --- Lists image files with their targets and parts ---


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


# --- The data set ---

# N file

DARK = 2**13  # below it are images with 12 bits and less, saved with 16
CACHE_BYTES = 2 * 2**30  # decode=auto caches up to this size of decoded images


class Folder(Images):
    """Images of any size, resized to `image_size` when decoded: once into the cache, or by workers in every epoch.

    Raises:
        UserError: the folder or the CSV has a mistake, or files are broken.
    """

    source = "disk"

    def __init__(
        self, *, root: str, csv: str | None = None, target: str = "class", decode: str = "auto", skip_broken: bool = False,
        test_fraction: float = 0.1, val_fraction: float = 0.1, folds: int | None = None, cache_dir: str | None = None, **images: Any
    ) -> None:  # fmt: skip
        super().__init__(**images)
        self.root, self.kind, self.asked = Path(root).expanduser(), target, decode
        self.csv = csv and self.root / Path(csv).expanduser()
        self.skip_broken, self.cache = skip_broken, cache_folder(cache_dir)
        self.fractions = {"test": test_fraction, **({} if folds else {"val": val_fraction})}
        self.where = f"data.root={self.root}" if csv is None else f"data.csv={csv}"

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        yield from super().problems(data)
        if (kind := data.get("target")) not in TARGETS:
            yield f"data.target={kind} is unknown; use one of {', '.join(TARGETS)}{did_you_mean(str(kind), TARGETS)}."
        elif kind != "class" and data.get("csv") is None:
            yield f"data.target={kind} needs a list of files and targets. Set data.csv=<file> as well, or data.target=class."

    # --- files, targets and splits ---

    @cached_property
    def listing(self) -> Listing:
        with reading(self.root):
            return from_csv(self.csv, self.kind) if self.csv else class_folders(self.root)

    @cached_property
    def encoded(self) -> tuple[list[str], NDArray[Any]]:
        """The names of classes or labels, in the order of their numbers, and the targets."""
        found = encoded(self.listing.targets, self.kind, self.where)
        raise_problems(islice(cell_problems(found[0], self.kind, self.listing, self.where) if self.csv else (), SHOWN))
        return found

    @cached_property
    def parts(self) -> NDArray[np.str_]:
        """The part of each file. Broken files are assigned too, so skipping them does not move other files.

        Rows of a CSV with the same path are in the same part.
        """
        names, targets = self.encoded
        place_of: dict[str, int] = {}
        place_N = np.array([place_of.setdefault(path, len(place_of)) for path in self.listing.paths])
        first_U = np.unique(place_N, return_index=True)[1]
        strata = targets if self.kind == "class" else np.zeros(len(targets), np.int64)
        parts = divided(np.array(self.listing.parts)[first_U], strata[first_U], self.fractions)[place_N]
        for part in ("train", *self.fractions):
            if not (parts == part).any():
                raise UserError(f"{self.where} has {len(parts)} images: too few for a {part} part. Add some.")
        if self.kind == "class" and (lost := set(targets) - set(targets[parts == "train"])):
            raise UserError(f"{self.where}: no training image of class {names[min(lost)]}. Add one.")
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
            state: list[int] = []  # of a file that is not there
            with suppress(OSError):
                state = stamp(listing.base / path)
            digest.update(repr((path, target, str(part), *state)).encode())
        decoding = (BACKGROUND, *(self.decoding.values() if self.in_cache else ()))
        return key_of("folder", [], str(listing.base.resolve()), self.kind, decoding, digest.hexdigest())

    @cached_property
    def cached(self) -> Cached:
        """Reads every file once per machine. Raises UserError that lists the broken ones."""
        cached = decoded(self.cache / self.key(), self.read_files)
        broken: dict[str, str] = cached.extra["broken"]
        if broken and not self.skip_broken:
            lines = [f"\n  {path}: {why}" for path, why in list(broken.items())[:SHOWN]]
            more = f"\n  and {len(broken) - SHOWN:,} more" if len(broken) > SHOWN else ""
            raise UserError(
                f"{len(broken):,} of {len(self.listing.paths):,} image files cannot be read:{''.join(lines)}{more}\nRepair or remove them, or set data.skip_broken=true to train without them."
            )
        return cached

    def read_files(self) -> tuple[Parts, dict[str, Any]]:
        """Reads all files; returns the arrays of each part if images go into the cache."""
        names, target_N = self.encoded
        digest, parts, broken, brightest = hashlib.sha256(repr(names).encode()), Parts(), dict[str, str](), 0
        for part in (each for each in PARTS if (self.parts == each).any()):
            places = np.flatnonzero(self.parts == part)
            shape = (len(places), self.channels, self.image_size, self.image_size)
            rows, good = scratch(self.cache, shape) if self.in_cache else None, np.ones(len(places), bool)
            paths = [self.listing.paths[place] for place in places]
            results = read_all(self.listing.base, paths, f"reading {part} images", image_NCHW=rows, **self.decoding)
            for row, (sha, problem, bright) in enumerate(results):
                brightest = max(brightest, bright)
                good[row] = problem is None
                if problem is None:
                    path = Path(paths[row]).as_posix()
                    digest.update(repr((part, path, self.listing.targets[places[row]])).encode() + sha)
                else:
                    broken[paths[row]] = problem
            if rows is not None:
                parts[f"{part}/input"] = rows if good.all() else rows[good]
                parts[f"{part}/target"] = target_N[places[good]]
        return parts, {"sha256": digest.hexdigest(), "broken": broken, "brightest": brightest}

    def prepare(self) -> None:
        broken, brightest = self.facts["skipped"], self.cached.extra.get("brightest", 0)
        several, is_dark = f"are two {TARGETS[self.kind]}", 0 < brightest < DARK
        alike = "; ".join(f"{one} and {other} {several}" for one, other in pairs(self.encoded[0], similar))
        commas = next((name for name in self.encoded[0] if self.kind == "labels" and "," in name), None)
        notices = {
            f"{alike} of {self.where}. Spell them alike if they are meant as one.": alike,
            f"{commas!r} of {self.where} is one label. Separate several with |.": commas,
            f"{broken:,} broken image files of {self.where} are skipped (data.skip_broken=true).": broken,
            f"the 16-bit images of {self.where} are nearly black: {WHITE_16:,} is white, and none has more than {brightest:,}. Multiply their pixels, or save them with 8 bits.": is_dark,
        }
        self.notice = " ".join(text for text, holds in notices.items() if holds) or None

    @property
    def facts(self) -> dict[str, Any]:
        return {"skipped": len(self.cached.extra["broken"]), "left_out": self.listing.left_out or None}

    @property
    def fingerprint(self) -> str:  # type: ignore[override]  # of the files, not of the decoded pixels
        return str(self.cached.unchanged().extra["sha256"])

    @cached_property
    def about(self) -> dict[str, Any]:
        return {**super().about, TARGETS[self.kind]: self.encoded[0] or ["target"]}

    # --- parts ---

    def readable(self, part: str) -> list[int]:
        """The places of a part's files in the listing, without broken ones."""
        broken = self.cached.extra["broken"]
        return [int(i) for i in np.flatnonzero(self.parts == part) if self.listing.paths[i] not in broken]

    def paths(self, part: str) -> list[str]:
        return [self.listing.paths[place] for place in self.readable(part)]

    def open_part(self, part: str) -> Arrays | Files | None:
        if not (self.parts == part).any():
            return None
        if not self.readable(part):
            raise UserError(f"{self.where}: all images of the {part} part are broken. Repair some.")
        if self.in_cache:
            return Arrays(**self.cached.arrays(part))
        return self.files(part)

    def files(self, part: str) -> Files:
        return Files(self.listing.base, self.paths(part), self.encoded[1][self.readable(part)], **self.decoding)

    def whole(self, part: str, least: int) -> Files | None:
        """Crops of what decode=cache has in the cache come from there: they are faster, and not as sharp."""
        if self.asked == "cache":
            return None
        files = self.files(part)
        files.decoding = {**files.decoding, "least": least}
        return files
