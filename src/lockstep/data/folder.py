"""Your own image files: a folder per class, or a CSV of paths and targets. Free of torch."""

# N file

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.config.words import nearest
from lockstep.data.cache import Cached, Parts, cache_folder, decoded, key_of
from lockstep.data.decoding import Files, read_all, scratch, shown
from lockstep.data.images import Images
from lockstep.data.listing import Listing, class_folders, from_csv
from lockstep.data.samples import Arrays
from lockstep.data.splits import PARTS, divided, taken_from_train
from lockstep.data.targets import KINDS, names_of, targets_of
from lockstep.errors import UserError

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
