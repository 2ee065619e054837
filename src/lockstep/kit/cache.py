"""Data decoded once per machine into arrays that all processes map and so share. Does not import torch."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep import DataChanged, UserError, add_arrays, explain_os_error, files, formatting, system

FORMAT = 4  # version of the cache; increment it when the format of the files changes
# What reading a truncated or changed file raises.
DAMAGE = (ValueError, TypeError, KeyError, EOFError, AttributeError, RecursionError)
ROOM = "Free some space, or set data.cache_dir=<a writable folder with enough space>."

Parts = dict[str, NDArray[Any]]  # `train/input`, `train/target`, `test/input`, ...
Decode = Callable[[], tuple[Parts, dict[str, Any]]]

verified: dict[Path, dict[str, list[int]]] = {}  # files that this process has hashed, with their sizes and times


@dataclass(frozen=True)
class Cached:
    """Decoded arrays in a cache folder."""

    folder: Path
    sha256: str  # of the decoded arrays, so it is the same for compressed and plain files
    extra: dict[str, Any]  # plain values stored with the arrays

    def unchanged(self) -> "Cached":
        """Returns itself. Raises DataChanged if the mapped files have changed since they were decoded."""
        with suppress(OSError):  # removed or unreadable: the mapped arrays stay valid
            if load_cache(self.folder) != self:
                raise DataChanged(
                    f"the decoded data in {self.folder} changed while this run used it. Rerun the command with resume=auto: it decodes "
                    "the data again and continues from the last checkpoint, which was saved before the change."
                )
        return self

    def arrays(self, part: str) -> Parts:
        """The memory-mapped arrays of a part such as `train`; empty if the part does not exist."""
        return {path.stem: map_file(path) for path in sorted((self.folder / part).glob("*.npy"))}


def cache_folder(path: str | None) -> Path:
    """The folder set by data.cache_dir; by default lockstep/ in the user's cache folder."""
    if path:
        return Path(path).expanduser()
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
        base.mkdir(parents=True, exist_ok=True)
        return base
    except (OSError, RuntimeError):  # no writable home directory, as in some containers
        return private_folder()


def private_folder() -> Path:
    """The temporary folder lockstep-<user>. Raises UserError if others can access it: they may have created it."""
    path = Path(tempfile.gettempdir(), f"lockstep-{system.USER_ID}")
    with suppress(FileExistsError):
        path.mkdir(0o700, parents=True)
    if system.is_private_folder(path):
        return path
    raise UserError(f"{path} is not a folder that only you can access. Set data.cache_dir=<a folder>.")


def key_of(name: str, files: list[Path], *settings: object) -> str:
    """The name of the cache folder for these source files. A changed file gets a new folder."""
    stats = [(str(path.resolve()), *file_state(path)) for path in files]
    return f"{name}-{hashlib.sha256(repr((FORMAT, stats, settings)).encode()).hexdigest()[:16]}"


@contextmanager
def one_download(cache: Path, name: str, root: Path) -> Iterator[None]:
    """Makes runs on a machine download the data `name` one at a time: all but the first then find it in `root`."""
    cache.mkdir(parents=True, exist_ok=True)
    with files.locked(cache / f".{key_of(name, [], str(root.resolve()))}.lock"):
        yield


def file_hash(path: Path, algorithm: str) -> str:
    with files.open_plain(path, follows=True) as file:
        return hashlib.file_digest(file, algorithm).hexdigest()  # type: ignore[arg-type]  # it is a buffered reader


def map_file(path: Path) -> NDArray[Any]:
    """The memory-mapped array of a file. Raises OSError if it is a link or not a regular file."""
    files.open_plain(path).close()  # check the file first: np.load can map a path only
    return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]


def decode_once(folder: Path, decode: Decode) -> Cached:
    """The arrays in `folder`. If missing or damaged, one process writes what `decode` returns; the others wait.

    Raises:
        UserError: the cache cannot be written, or its disk is full.
    """
    if cached := load_cache_or_none(folder):
        return cached
    files.refuse_unwritable(folder.parent, "data.cache_dir")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with files.locked(folder.with_name(f"{folder.name}.lock")):
        if cached := load_cache_or_none(folder):
            return cached
        if folder.exists():
            formatting.warn(f"the decoded data in {folder} is damaged and will be decoded again.")
            files.remove(folder)  # processes that have mapped its files can still read them
        parts, extra = decode()
        with explain_os_error(f"data.cache_dir={folder.parent} cannot be written", ROOM):
            return write(parts, extra, folder)


def load_cache_or_none(folder: Path) -> Cached | None:
    """The arrays in `folder`; None if they are missing or damaged."""
    with suppress(OSError):
        return load_cache(folder)
    return None


def load_cache(folder: Path) -> Cached | None:
    """The arrays in `folder`; None if they differ from what was written. Raises OSError if they cannot be read.

    Hashes the files (0.7 GB/s) only if their size or modification time has changed since they were written.
    """
    try:
        metadata = json.loads(files.read_text(folder / "about.json"))
        if metadata.pop("check") != checksum_of(metadata):
            return None
        stamps = {name: file_state(folder / f"{name}.npy") for name in metadata["stamps"]}
        if stamps not in (metadata["stamps"], verified.get(folder)):
            arrays = {name: map_file(folder / f"{name}.npy") for name in metadata["stamps"]}
            if digest_of(arrays, metadata["extra"]) != metadata["sha256"]:
                return None
            verified[folder] = stamps
        return Cached(folder, metadata["sha256"], metadata["extra"])
    except DAMAGE:
        return None


def checksum_of(metadata: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


def file_state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def digest_of(parts: Parts, extra: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(extra, sort_keys=True).encode())
    add_arrays(digest, parts)
    return digest.hexdigest()


def write(parts: Parts, extra: dict[str, Any], folder: Path) -> Cached:
    """Writes arrays and plain values into `folder` atomically. Raises OSError."""
    arrays = {name: np.ascontiguousarray(values) for name, values in parts.items()}
    with files.atomic_replace(folder) as temporary:
        stamps = {}
        for name, array in arrays.items():
            path = temporary / f"{name}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, array)
            stamps[name] = file_state(path)
        sha256 = digest_of(arrays, extra)
        metadata = {"sha256": sha256, "extra": extra, "stamps": stamps}
        temporary.mkdir(exist_ok=True)  # not created yet if there are no arrays
        (temporary / "about.json").write_bytes(json.dumps(metadata | {"check": checksum_of(metadata)}).encode())
    return Cached(folder, sha256, extra)
