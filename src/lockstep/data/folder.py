"""Your own image files: a folder per class, or a CSV of paths and targets. Free of torch."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.cache import Cached, Parts, cache_folder, decoded, key_of, scratch, stamp
from lockstep.data.dataset import Arrays
from lockstep.data.images import PART_NAMES, Files, Images, Listing, files_below, read_all, read_csv, reading
from lockstep.data.pixels import ENDINGS
from lockstep.data.sampler import PARTS, divided
from lockstep.errors import UserError, did_you_mean, raise_problems

# --- Targets from CSV cells or folder names ---

# N sample · L label

TARGETS = {"class": "classes", "labels": "labels", "number": "targets"}  # and where `about` describes them
SEPARATORS = re.compile(r"[|;]")


def encoded(texts: Sequence[str], kind: str, where: str) -> tuple[list[str], NDArray[Any]]:
    """The names of classes or labels, and for each text its class number, 0 or 1 per label, or its number.

    A cell with several labels separates them: `red|round` or `red;round`. Raises UserError: there is only one name, or no number.
    """
    if kind == "number":
        return [], np.array([[number(text, f"{where}, line {line}")] for line, text in enumerate(texts, 2)], np.float32)
    labels_of = {text: [text] for text in texts}
    if kind == "labels":
        labels_of = {text: [label for part in SEPARATORS.split(text) if (label := part.strip())] for text in labels_of}
    names = sorted({label for labels in labels_of.values() for label in labels})
    if len(names) < 2:
        raise UserError(f"{where} has only one {kind}, {', '.join(names)}: there is nothing to learn.")
    place = {name: index for index, name in enumerate(names)}
    if kind == "class":
        return names, np.array([place[text] for text in texts], np.int64)
    target_NL = np.zeros((len(texts), len(names)), np.float32)
    for row, text in zip(target_NL, texts, strict=True):
        row[[place[label] for label in labels_of[text]]] = 1
    return names, target_NL


def number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        raise UserError(f"{where}: target={text} is not a number. Set data.target=class, or repair the line.")
    return value


# --- Lists image files with their targets and parts ---


def part_names(names: Iterable[str], where: str) -> dict[str, str]:
    """Those of `names` that mean a part, by the part. Raises UserError: two of them mean the same one."""
    by_part: dict[str, str] = {}
    for name in names:
        part = PART_NAMES.get(name.lower())
        if part in by_part:
            raise UserError(f"{where} has {by_part[part]} and {name}, which are both the {part} part. Merge them.")
        if part:
            by_part[part] = name
    return by_part


def folders(root: Path) -> list[str]:
    """Names of the folders in `root`, without hidden ones such as .ipynb_checkpoints."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def class_folders(root: Path) -> Listing:
    """Lists `root/<class>/...` or `root/train/<class>/...`, with or without `val` and `test` beside `train`.

    Raises:
        UserError: there are no classes, or only one; a class has no images; a part has a class that `train` lacks.
    """
    if not root.is_dir():
        raise UserError(
            f"data.root={root} does not exist. Set data.root=<folder with a folder of images for each class>."
        )
    part_folders = part_names(folders(root), f"data.root={root}")
    if part_folders and "train" not in part_folders:
        others = ", ".join(f"{name}/" for name in part_folders.values())
        raise UserError(f"data.root={root} has {others} but no train/. Move the other classes into {root / 'train'}.")
    part_folders = {"train": "", **part_folders}  # train comes first
    train = root / part_folders["train"]
    classes = folders(train)
    if len(classes) < 2:
        raise UserError(
            f"{train} has {f'only the folder {classes[0]}/' if classes else 'no folders'}. It needs a folder of images per class, for two "
            f"or more classes: {train}/<class>/<image>. For a list of files and targets, set data.csv=<file>."
        )
    listing, problems, base = Listing(root, []), [], os.path.join(root, "")  # noqa: PTH118  # the paths' beginning
    for part, part_folder in part_folders.items():
        for name in folders(root / part_folder):
            paths = [path[len(base) :] for path in files_below(os.path.join(root, part_folder, name))]  # noqa: PTH118
            if name not in classes:
                hint = did_you_mean(name, classes)
                problems.append(
                    f"{root / part_folder / name}: train/ has no class {name}{hint}. Rename or remove the folder."
                )
            elif not paths and part == "train":
                problems.append(
                    f"{train / name} holds no images (files that end in {', '.join(ENDINGS)}). Remove it, or set "
                    "data.root=<the folder that contains the class folders>."
                )
            listing.paths.extend(paths)
            listing.targets.extend([name] * len(paths))
            listing.parts.extend([part] * len(paths))
    raise_problems(problems)
    return listing


def from_csv(path: Path) -> Listing:
    """Lists the files of a CSV with the columns path, target and optionally split; paths are relative to the CSV.

    Raises:
        UserError: there is no such file, a column is missing, a path leads out of its folder, or a split has an unknown name.
    """
    if not path.is_file():
        raise UserError(
            f"{path} does not exist. data.csv is a file in data.root: set data.root=<folder> data.csv=<file>."
        )
    _, rows = read_csv(path, ("path", "target"), "path,target,split", str(path))
    parts, base = [], path.parent.absolute()
    for line, row in enumerate(rows, 2):
        name, split = row["path"] or "", row.get("split") or "train"
        if not name.strip("\0 ") or "\0" in name:
            raise UserError(f"{path}, line {line}: a row needs a path. Add it, or remove the line.")
        if not (base / name).is_relative_to(base) or ".." in Path(name).parts:
            raise UserError(
                f"{path}, line {line}: path={name} leads out of {path.parent}. Paths are relative to the CSV's folder."
            )
        if (part := PART_NAMES.get(split.strip().lower())) is None:
            raise UserError(f"{path}, line {line}: split={split} is unknown; use one of {', '.join(PART_NAMES)}.")
        parts.append(part)
    if "train" not in parts:
        raise UserError(f"{path} has no row with split=train.")
    return Listing(path.parent, [row["path"] for row in rows], [(row["target"] or "").strip() for row in rows], parts)


# --- The data set ---

# N file

CACHE_BYTES = 2 * 2**30  # decode=auto caches up to this size of decoded images
SHOWN = 10  # broken files that a message lists


class Folder(Images):
    """Images of any size, resized to `image_size` when decoded: once into the cache, or by workers in every epoch.

    Raises:
        UserError: the folder or the CSV has a mistake, or files are broken.
    """

    source = "disk"

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
        self.fractions = {"test": test_fraction, **({} if folds else {"val": val_fraction})}
        self.where = f"data.root={self.root}" if csv is None else f"data.csv={csv}"
        self.pixels = {"channels": self.channels, "size": self.image_size}

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
            return class_folders(self.root) if self.csv is None else from_csv(self.root / Path(self.csv).expanduser())

    @cached_property
    def encoded(self) -> tuple[list[str], NDArray[Any]]:
        """The names of classes or labels, in the order of their numbers, and the targets."""
        return encoded(self.listing.targets, self.kind, self.where)

    @cached_property
    def parts(self) -> NDArray[np.str_]:
        """The part of each file. Broken files are assigned too, so skipping them does not move other files."""
        names, targets = self.encoded
        parts = np.array(self.listing.parts)
        parts = divided(parts, targets if self.kind == "class" else np.zeros(len(parts), np.int64), self.fractions)
        for part in ("train", *self.fractions):
            if not (parts == part).any():
                raise UserError(
                    f"{self.where} has {len(parts)} images: too few for a {part} part. Add images, or put some into {part}/."
                )
        if self.kind == "class" and (lost := set(targets) - set(targets[parts == "train"])):
            raise UserError(
                f"{self.where}: no training image of class {names[min(lost)]}. Add some, or remove the class."
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
            state: list[int] = []  # of a file that is not there
            with suppress(OSError):
                state = stamp(listing.base / path)
            digest.update(repr((path, target, str(part), *state)).encode())
        decoding = (self.channels, self.image_size) if self.in_cache else ()
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
                f"{len(broken):,} of {len(self.listing.paths):,} image files cannot be read:{''.join(lines)}{more}\n"
                "Repair or remove them, or set data.skip_broken=true to train without them."
            )
        return cached

    def read_files(self) -> tuple[Parts, dict[str, Any]]:
        """Reads all files; returns the arrays of each part if images go into the cache."""
        names, target_N = self.encoded
        digest, parts, broken = hashlib.sha256(repr(names).encode()), Parts(), dict[str, str]()
        for part in (each for each in PARTS if (self.parts == each).any()):
            places = np.flatnonzero(self.parts == part)
            shape = (len(places), self.channels, self.image_size, self.image_size)
            rows, good = scratch(self.cache, shape) if self.in_cache else None, np.ones(len(places), bool)
            paths = [self.listing.paths[place] for place in places]
            results = read_all(self.listing.base, paths, f"reading {part} images", image_NCHW=rows, **self.pixels)
            for row, (sha, problem) in enumerate(results):
                good[row] = problem is None
                if problem is None:
                    path = Path(paths[row]).as_posix()
                    digest.update(repr((part, path, self.listing.targets[places[row]])).encode() + sha)
                else:
                    broken[paths[row]] = problem
            if rows is not None:
                parts[f"{part}/input"] = rows if good.all() else rows[good]
                parts[f"{part}/target"] = target_N[places[good]]
        return parts, {"sha256": digest.hexdigest(), "broken": broken}

    def prepare(self) -> None:
        if broken := self.facts["skipped"]:
            self.notice = f"{broken:,} broken image files of {self.where} are skipped (data.skip_broken=true)."

    @property
    def facts(self) -> dict[str, Any]:
        return {"skipped": len(self.cached.extra["broken"])}

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
        if not (places := self.readable(part)):
            raise UserError(f"{self.where}: all images of the {part} part are broken. Repair some.")
        if self.in_cache:
            return Arrays(**self.cached.arrays(part))
        return Files(self.listing.base, self.paths(part), self.encoded[1][places], **self.pixels)
