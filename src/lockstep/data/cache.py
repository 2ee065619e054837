"""Data decoded once per machine into a folder of arrays that all processes map, so n processes share one copy. Free of torch."""

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.config.words import warn
from lockstep.data.dataset import add_arrays
from lockstep.errors import DataChanged, UserError, explained
from lockstep.machine.files import locked, open_plain, read_text, refuse_unwritable, remove, replacing

FORMAT = 4  # version of the cache; raise it when the files change
# Of a file that was cut off or changed.
DAMAGE = (ValueError, TypeError, KeyError, EOFError, AttributeError, RecursionError)
ROOM = "Free some space, or set data.cache_dir=<a folder with room that is yours>."

Parts = dict[str, NDArray[Any]]  # `train/input`, `train/target`, `test/input`, ...
Decode = Callable[[], tuple[Parts, dict[str, Any]]]

verified: dict[Path, dict[str, list[int]]] = {}  # files that were hashed: their sizes and times


@dataclass(frozen=True)
class Cached:
    """Decoded arrays in a folder of the cache."""

    folder: Path
    sha256: str  # of the decoded arrays, so equal for compressed and plain files
    extra: dict[str, Any]  # plain values stored beside the arrays

    def unchanged(self) -> "Cached":
        """Itself. Raises DataChanged if the files that this process has mapped are no longer what was decoded."""
        with contextlib.suppress(OSError):  # it was removed, or cannot be read now: what is mapped stays
            if checked(self.folder) != self:
                raise DataChanged(
                    f"the decoded data in {self.folder} changed while this run used it. Rerun the command with resume=auto: it decodes "
                    "the data again and continues from the last checkpoint, which was saved before the change."
                )
        return self

    def arrays(self, part: str) -> Parts:
        """The memory-mapped arrays of a part such as `train`; empty if there is no such part."""
        return {path.stem: mapped(path) for path in sorted((self.folder / part).glob("*.npy"))}


def cache_folder(given: str | None) -> Path:
    """The folder of data.cache_dir; by default lockstep/ in the user's cache folder."""
    if given:
        return Path(given).expanduser()
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
        base.mkdir(parents=True, exist_ok=True)
        return base
    except (OSError, RuntimeError):  # the home directory is not writable, or there is none, as in some containers
        return private_folder()


def private_folder() -> Path:
    """The first folder lockstep-<user>, lockstep-<user>-1, ... of the temporary ones that is this user's alone: others may make some."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    for number in range(10):
        path = Path(tempfile.gettempdir(), f"lockstep-{user}{f'-{number}' if number else ''}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700, parents=True)
        found = path.lstat()  # of a link, itself
        if stat.S_ISDIR(found.st_mode) and found.st_uid == user and (os.name == "nt" or not found.st_mode & 0o077):
            return path
    raise UserError(f"{tempfile.gettempdir()} holds no folder that is yours alone. Set data.cache_dir=<a folder>.")


def key_of(name: str, files: list[Path], *more: object) -> str:
    """Names a cache folder by its source files, so a changed file gets a new folder."""
    stats = [(str(path.resolve()), *stamp(path)) for path in files]
    return f"{name}-{hashlib.sha256(repr((FORMAT, stats, more)).encode()).hexdigest()[:16]}"


@contextlib.contextmanager
def one_download(cache: Path, name: str, root: Path) -> Iterator[None]:
    """Runs on one machine fetch the data `name` one after the other, so all but the first find it in `root`."""
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f".{key_of(name, [], str(root.resolve()))}.lock"):
        yield


def hash_of(path: Path, algorithm: str) -> str:
    with open_plain(path, follows=True) as file:
        return hashlib.file_digest(file, algorithm).hexdigest()  # type: ignore[arg-type]  # it is a buffered reader


def mapped(path: Path) -> NDArray[Any]:
    """The array of a file. Raises OSError: it is a link or not a regular file."""
    open_plain(path).close()  # np.load maps by path only
    array: NDArray[Any] = np.load(path, mmap_mode="r")
    return array


def decoded(folder: Path, decode: Decode) -> Cached:
    """The arrays in `folder`. One process writes what `decode` returns; others wait for it. Damaged ones are decoded again.

    Raises:
        UserError: the cache cannot be written, or its disk is full.
    """
    if cached := intact(folder):
        return cached
    refuse_unwritable(folder.parent, "data.cache_dir")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock")):
        if cached := intact(folder):
            return cached
        if folder.exists():
            warn(f"the decoded data in {folder} is damaged and is decoded again.")
            remove(folder)  # processes that have mapped its files keep them
        parts, extra = decode()
        with explained(f"data.cache_dir={folder.parent} cannot be written", ROOM):
            return write(parts, extra, folder)


def intact(folder: Path) -> Cached | None:
    """The arrays in `folder`, unless they are missing or damaged."""
    with contextlib.suppress(OSError):
        return checked(folder)
    return None


def checked(folder: Path) -> Cached | None:
    """The arrays in `folder`; None if they are not what was written. Raises OSError if they cannot be read.

    Files are hashed (0.7 GB/s) only if their size or time is not what it was when they were written.
    """
    try:
        about = json.loads(read_text(folder / "about.json"))
        if about.pop("check") != check_of(about):
            return None
        now = {name: stamp(folder / f"{name}.npy") for name in about["stamps"]}
        if now not in (about["stamps"], verified.get(folder)):
            arrays = {name: mapped(folder / f"{name}.npy") for name in about["stamps"]}
            if digest_of(arrays, about["extra"]) != about["sha256"]:
                return None
            verified[folder] = now
        return Cached(folder, about["sha256"], about["extra"])
    except DAMAGE:
        return None


def check_of(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def digest_of(parts: Parts, extra: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(extra, sort_keys=True).encode())
    add_arrays(digest, parts)
    return digest.hexdigest()


def write(parts: Parts, extra: dict[str, Any], folder: Path) -> Cached:
    """Writes arrays and plain values into `folder`, which appears whole or not at all. Raises OSError."""
    arrays = {name: np.ascontiguousarray(values) for name, values in parts.items()}
    with replacing(folder) as part:
        stamps = {}
        for name, array in arrays.items():
            path = part / f"{name}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, array)
            stamps[name] = stamp(path)
        sha256 = digest_of(arrays, extra)
        about = {"sha256": sha256, "extra": extra, "stamps": stamps}
        part.mkdir(exist_ok=True)  # without arrays
        (part / "about.json").write_text(json.dumps(about | {"check": check_of(about)}))
    return Cached(folder, sha256, extra)
