"""Your own image files: a folder per class, or a CSV of paths and targets. Does not import torch."""

import hashlib
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep import Arrays, UserError, did_you_mean, explain_os_error, formatting, raise_problems, sampler
from lockstep.kit.augment import Augmentation
from lockstep.kit.cache import ROOM, Cached, Parts, cache_folder, decode_once, file_state, key_of, load_cache_or_none
from lockstep.kit.images import Files, Images, Packed, read_all, with_decode_arguments
from lockstep.kit.listing import SEPARATORS, SHOWN, Listing, class_folders, explain_root_error, from_csv
from lockstep.kit.pixels import BACKGROUND, Frame

# --- Targets from CSV cells or folder names ---

# N sample · L label

TARGETS = {"class": "classes", "labels": "labels", "number": "targets"}  # and their key in `metadata`


def fold_name(name: str) -> str:
    """A key that is equal for names that look the same: ignores spaces, zero-width characters and Unicode forms."""
    return unicodedata.normalize("NFC", " ".join(re.sub("[\u200b\ufeff]", "", name).split()))


def class_key(name: str) -> str:
    """A key that is equal for names that may mean the same class. Case matters for single letters, such as a and A."""
    return name.lower() if len(name) > 1 else name


def pairs(names: Sequence[str], key: Callable[[str], str]) -> list[tuple[str, str]]:
    """The first pairs of different names with the same key."""
    first_name = {key(name): name for name in reversed(names)}
    return [(first_name[key(name)], name) for name in names if first_name[key(name)] != name][:SHOWN]


def encode_targets(texts: Sequence[str], kind: str, where: str) -> tuple[list[str], NDArray[Any]]:
    """The names of classes or labels, and the target of each text: its class number, 0 or 1 per label, or its number.

    A cell may have several labels: `red|round` or `red;round`. Raises UserError if there is only one name.
    """
    if kind == "number":
        return [], np.array([[float(text)] for text in texts], np.float32)
    labels_of = {text: [*filter(None, SEPARATORS.split(text))] if kind == "labels" else [text] for text in texts}
    names = sorted({label for labels in labels_of.values() for label in labels})
    problem = "look the same. Use one spelling, or names that are easy to tell apart."
    similar = pairs(names, fold_name)
    raise_problems(f"{where} has {first!r} and {second!r}, which {problem}" for first, second in similar)
    if len(names) < 2:
        raise UserError(f"{where} has only one {kind}, {', '.join(names)}: there is nothing to learn.")
    index_of = {name: index for index, name in enumerate(names)}
    if kind == "class":
        return names, np.array([index_of[text] for text in texts], np.int64)
    target_NL = np.zeros((len(texts), len(names)), np.float32)
    for row, text in zip(target_NL, texts, strict=True):
        row[[index_of[label] for label in labels_of[text]]] = 1
    return names, target_NL


# --- The data set ---

# N file

CACHE_BYTES = 2 * 2**30  # decode=auto caches decoded images up to this size


class Folder(Images):
    """Images of any size, decoded once into the cache or by workers in every epoch.

    `presize`: images for workers are stored once as JPEGs, with a shorter side of this multiple of the image formatting.size.

    Raises:
        UserError: the folder or the CSV has errors, or files are broken.
    """

    source = "disk"

    def __init__(
        self, *, root: str, csv: str | None = None, target: str = "class", decode: str = "auto", presize: float | None = None,
        skip_broken: bool = False, test_fraction: float = 0.1, val_fraction: float = 0.1, folds: int | None = None, cache_dir: str | None = None,
        **images: Any,
    ) -> None:  # fmt: skip
        super().__init__(**images)
        self.root, self.kind, self.asked, self.presize = Path(root).expanduser(), target, decode, presize
        self.csv = csv and self.root / Path(csv).expanduser()
        self.skip_broken, self.cache = skip_broken, cache_folder(cache_dir)
        self.fractions = {"test": test_fraction, **({} if folds else {"val": val_fraction})}
        self.where = f"data.root={self.root}" if csv is None else f"data.csv={csv}"

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        yield from super().problems(data)
        if (kind := data.get("target")) not in TARGETS:
            yield f"data.target={kind} is unknown; use one of {', '.join(TARGETS)}{did_you_mean(str(kind), TARGETS)}."
        if data.get("presize") and data.get("decode") == "cache":
            yield f"data.presize={data['presize']} has no effect with data.decode=cache. Remove one of them."
        if kind in TARGETS and kind != "class" and data.get("csv") is None:
            yield f"data.target={kind} needs a list of files and targets. Set data.csv=<file> as well, or data.target=class."

    # --- files, targets and splits ---

    @cached_property
    def listing(self) -> Listing:
        with explain_root_error(self.root):
            return from_csv(self.csv, self.kind) if self.csv else class_folders(self.root)

    @cached_property
    def encoded(self) -> tuple[list[str], NDArray[Any]]:
        """The names of classes or labels, in the order of their numbers, and the targets."""
        return encode_targets(self.listing.targets, self.kind, self.where)

    @cached_property
    def parts(self) -> NDArray[np.str_]:
        """The part of each file. Broken files have one too, so skipping them does not change the parts of other files.

        Rows of a CSV with the same path are in the same part.
        """
        names, targets = self.encoded
        index_of: dict[str, int] = {}
        index_N = np.array([index_of.setdefault(path, len(index_of)) for path in self.listing.paths])
        first_U = np.unique(index_N, return_index=True)[1]
        strata = targets if self.kind == "class" else np.zeros(len(targets), np.int64)
        parts = sampler.divide_parts(np.array(self.listing.parts)[first_U], strata[first_U], self.fractions)[index_N]
        for part in ("train", *self.fractions):
            if not (parts == part).any():
                raise UserError(f"{self.where} has {len(parts)} images: too few for a {part} part. Add some.")
        if self.kind == "class" and (untrained := set(targets) - set(targets[parts == "train"])):
            raise UserError(f"{self.where}: no training image of class {names[min(untrained)]}. Add one.")
        return parts

    # --- content ---

    @cached_property
    def places(self) -> dict[str, NDArray[np.int64]]:
        """The indices in the listing of each part's files."""
        return {part: index_N for part in sampler.PARTS if len(index_N := np.flatnonzero(self.parts == part))}

    @cached_property
    def stored(self) -> dict[str, Frame | int | None]:
        """How the cache stores each part: as squares, as JPEGs with this shorter side in pixels, or not at all."""
        side = round(self.presize * max(self.frame.size, self.eval_frame.size)) if self.presize else None
        forms: dict[str, Frame | int | None] = dict.fromkeys(self.places, side)
        keeps_whole = Augmentation(self.operations).crops_from is not None  # for random crops
        budget = 0 if self.asked == "workers" else CACHE_BYTES if self.asked == "auto" else math.inf
        for part in reversed(self.places):  # train is last, so an evaluation without it makes the same choices
            frame = self.frame if part == "train" else self.eval_frame
            budget -= len(self.places[part]) * self.channels * frame.size**2
            if part == "train" and self.evaluates:
                forms[part] = None
            elif budget >= 0 and not (part == "train" and keeps_whole and self.asked == "auto"):
                forms[part] = frame
        return forms

    @cached_property
    def keys(self) -> dict[str, str]:
        """The cache key of each part, from its files' names, sizes and times."""
        keys, listing = dict[str, str](), self.listing
        for part, indices in self.places.items():
            digest = hashlib.sha256()
            for path in (listing.paths[index] for index in indices):
                file_stamp: list[int] = []  # stays empty for a missing file
                with suppress(OSError):
                    file_stamp = file_state(listing.base / path)
                digest.update(repr((path, *file_stamp)).encode())
            keys[part] = key_of(
                "folder", [], str(listing.base.resolve()), BACKGROUND, self.channels, digest.hexdigest()
            )
        return keys

    def cache_of(self, part: str, form: Frame | int | None) -> Path:
        name = hashlib.sha256(repr(form).encode()).hexdigest()[:8] if form else "files"
        return self.cache / f"{self.keys[part]}-{name}"

    def known(self, part: str) -> Cached | None:
        """The part in the cache, or None. If it need not be stored, any form will do: its files were checked then."""
        form = self.stored[part]
        folders = [self.cache_of(part, form)] if form else sorted(self.cache.glob(f"{self.keys[part]}-*"))
        return next((cached for folder in folders if (cached := load_cache_or_none(folder))), None)

    @cached_property
    def cached(self) -> dict[str, Cached]:
        """The parts in the cache. Reads every file once per machine. Raises UserError that lists the broken files."""
        parts = {}
        for part, form in self.stored.items():
            read = partial(self.read_files, part, form)
            parts[part] = self.known(part) or decode_once(self.cache_of(part, form), read)
        broken = {path: reason for cached in parts.values() for path, reason in cached.extra["broken"].items()}
        if broken and not self.skip_broken:
            lines = [f"\n  {path}: {reason}" for path, reason in list(broken.items())[:SHOWN]]
            rest = f"\n  and {len(broken) - SHOWN:,} more" if len(broken) > SHOWN else ""
            raise UserError(
                f"{len(broken):,} of {len(self.listing.paths):,} image files cannot be read:{''.join(lines)}{rest}\nRepair or remove them, or set data.skip_broken=true to train without them."
            )
        return parts

    def read_files(self, part: str, form: Frame | int | None) -> tuple[Parts, dict[str, Any]]:
        """Reads all files of a part. Returns their hashes, and their images in the `form` to store."""
        paths = [self.listing.paths[index] for index in self.places[part]]
        sha256_N, end_N, broken = [], [], dict[str, str]()
        with (
            explain_os_error(f"data.cache_dir={self.cache} cannot be written", ROOM),
            TemporaryFile(dir=self.cache) as file,
        ):
            contents = read_all(self.listing.base, paths, f"reading {part} images", form=form, channels=self.channels)
            for path, read in zip(paths, contents, strict=True):
                sha256_N.append(np.frombuffer(read.sha256, np.uint8))
                if read.problem:
                    broken[path] = read.problem
                else:
                    file.write(read.stored)
                    end_N.append(file.tell())
            file.flush()
            content = np.memmap(file, np.uint8) if file.tell() else np.empty(0, np.uint8)
        arrays = {"part/sha256": np.stack(sha256_N)}
        if isinstance(form, Frame):
            arrays["part/input"] = content.reshape(-1, self.channels, form.size, form.size)
        elif form:
            arrays |= {"part/content": content, "part/end": np.array(end_N)}
        return arrays, {"broken": broken}

    def storage_plan(self) -> str | None:
        new = [part for part in self.places if not self.known(part)]
        if not new:
            return None
        squares = {part: form for part, form in self.stored.items() if isinstance(form, Frame)}
        size = sum(form.size**2 * self.channels * len(self.places[part]) for part, form in squares.items())
        jobs = [f"{', '.join(squares)}: decoded once, {formatting.size(size)} in {self.cache}"] * bool(squares)
        if len(squares) < len(self.places):
            storage = f" stored with {self.presize} times data.image_size in {self.cache}, and" if self.presize else ""
            jobs.append(f"others:{storage} decoded by workers in every epoch")
        return f"{sum(map(len, self.places.values())):,} images. {'; '.join(jobs)}."

    def prepare(self) -> None:
        broken, are_two = self.data_info["skipped"], f"are two separate {TARGETS[self.kind]}"
        variants = "; ".join(f"{first} and {second} {are_two}" for first, second in pairs(self.encoded[0], class_key))
        all_squares = self.presize and all(isinstance(form, Frame) for form in self.stored.values())
        notices = {
            f"{variants} of {self.where}. If they mean the same, use one spelling.": variants,
            f"{broken:,} broken image files of {self.where} are skipped (data.skip_broken=true).": broken,
            f"data.presize={self.presize} has no effect: all images are decoded once, as squares. Remove it, or set data.decode=workers.": all_squares,
        }
        self.notice = " ".join(text for text, holds in notices.items() if holds) or None

    @property
    def data_info(self) -> dict[str, Any]:
        skipped = sum(len(cached.extra["broken"]) for cached in self.cached.values())
        return {"skipped": skipped, "left_out": self.listing.left_out or None}

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the files and their targets, not of decoded pixels."""
        digest = hashlib.sha256(repr(self.encoded[0]).encode())
        for part, indices in self.places.items():
            broken, sha256_N = self.cached[part].extra["broken"], self.cached[part].arrays("part")["sha256"]
            for index, sha256 in zip(indices, sha256_N, strict=True):
                path, target = self.listing.paths[index], self.listing.targets[index]
                if path not in broken:
                    digest.update(repr((part, Path(path).as_posix(), target)).encode() + sha256.tobytes())
        return digest.hexdigest()

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        for cached in self.cached.values():
            cached.unchanged()
        return self.digest

    @cached_property
    def metadata(self) -> dict[str, Any]:
        return {**super().metadata, TARGETS[self.kind]: self.encoded[0] or ["target"]}

    # --- parts ---

    def readable(self, part: str) -> list[int]:
        """The indices in the listing of a part's files, without broken files."""
        broken = self.cached[part].extra["broken"]
        return [int(index) for index in self.places[part] if self.listing.paths[index] not in broken]

    def paths(self, part: str) -> list[str]:
        return [self.listing.paths[index] for index in self.readable(part)]

    def open_part(self, part: str) -> Arrays | Files | None:
        if part not in self.places:
            return None
        if not self.readable(part):
            raise UserError(f"{self.where}: all images of the {part} part are broken. Repair some.")
        if isinstance(self.stored[part], Frame):
            return Arrays(input=self.cached[part].arrays("part")["input"], target=self.encoded[1][self.readable(part)])
        return self.files(part)

    def files(self, part: str) -> Files:
        target_N, form = self.encoded[1][self.readable(part)], self.stored[part]
        decoding = {**self.decoding, "frame": self.frame if part == "train" else self.eval_frame}
        if form and not isinstance(form, Frame):
            arrays = self.cached[part].arrays("part")
            return Packed(arrays["content"], arrays["end"], target_N, **decoding)
        return Files(self.listing.base, self.paths(part), target_N, **decoding)

    def uncropped(self, part: str, least: int) -> Any:
        """None with decode=cache: random crops then come from the cached squares, which is faster but less sharp."""
        return None if self.asked == "cache" else with_decode_arguments(self.files(part), least=least)

    @property
    def evaluated(self) -> Images:
        dataset = super().evaluated
        if dataset is not self and "val" not in self.places:  # validation uses a part of the training samples
            dataset.train = with_decode_arguments(self.files("train"), frame=self.eval_frame)
        return dataset
