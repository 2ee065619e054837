"""Data decoded once per machine into a folder of arrays that all processes map, so n processes share one copy. Free of torch.

NumPy and filelock (0.3 s) are imported where data is read: the config check imports this module.
"""

import contextlib
import errno
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import DataChanged
from lockstep.machine.files import refuse_unwritable, remove, replacing

if TYPE_CHECKING:
    from numpy.typing import NDArray

verified: dict[Path, dict[str, list[int]]] = {}  # files that were hashed: their sizes and times

FORMAT = 4  # version of the cache; raise it when the files change

Parts = dict[str, "NDArray[Any]"]  # `train/input`, `train/target`, `test/input`, ...


DAMAGE = (ValueError, TypeError, KeyError, EOFError)  # of a file that was cut off or changed


@dataclass(frozen=True)
class Cached:
    """Decoded arrays in a folder of the cache."""

    folder: Path
    sha256: str  # of the decoded arrays, so equal for compressed and plain files

    def unchanged(self) -> "Cached":
        """Itself. Raises DataChanged if the files that this process has mapped are no longer what was decoded."""
        try:
            found = checked(self.folder)
        except OSError:  # it was removed, or cannot be read now: what is mapped stays
            return self
        except DAMAGE:
            found = None
        if found is None or found.sha256 != self.sha256:
            raise DataChanged(
                f"the decoded data in {self.folder} was changed while this run used it. It is made anew when you type the command "
                "again with resume=auto; the run then continues from its last checkpoint, which was saved before the change was there."
            )
        return self

    def arrays(self, part: str) -> "Parts":
        """The memory-mapped arrays of a part such as `train`; empty if there is no such part."""
        import numpy as np

        found = sorted((self.folder / part).glob("*.npy"))
        return {path.stem: np.load(path, mmap_mode="r") for path in found}

    def extra(self) -> dict[str, Any]:
        """The plain values stored beside the arrays."""
        return json.loads((self.folder / "about.json").read_text())["extra"]


def default_cache() -> Path:
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
        base.mkdir(parents=True, exist_ok=True)
        return base
    except (OSError, RuntimeError):  # the home directory is not writable, or there is none, as in some containers
        return Path(tempfile.gettempdir()) / f"lockstep-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"


def cache_folder(given: str | None) -> Path:
    return Path(given).expanduser() if given else default_cache()


def key_of(name: str, files: list[Path], *more: object) -> str:
    """Names a cache folder by its source files, so a changed file gets a new folder."""
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{name}-{hashlib.sha256(repr((FORMAT, stats, more)).encode()).hexdigest()[:16]}"


def decoded(folder: Path, decode: Callable[[], tuple[Parts, dict[str, Any]]]) -> Cached:
    """The arrays in `folder`. One process writes what `decode` returns; others wait for it. Damaged ones are made anew."""
    if found := intact(folder):
        return found
    from filelock import FileLock

    refuse_unwritable(folder.parent, "data.cache_dir")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if found := intact(folder):
            return found
        remove_left(folder.parent)
        if folder.exists():
            print(f"WARNING: the decoded data in {folder} is damaged and is made anew.", file=sys.stderr)
            remove(folder)  # processes that have mapped its files keep them
        return write(*decode(), folder)


def remove_left(cache: Path) -> None:
    """Removes what processes left that were killed while they wrote: no other process holds the lock of such a folder."""
    from filelock import FileLock, Timeout

    for part in cache.glob("*.part"):
        with contextlib.suppress(Timeout, OSError), FileLock(part.with_suffix(".lock"), timeout=0):
            remove(part)


def intact(folder: Path) -> Cached | None:
    """The arrays in `folder`, unless they are missing or damaged."""
    try:
        return checked(folder)
    except (OSError, *DAMAGE):
        return None


def checked(folder: Path) -> Cached | None:
    """The arrays in `folder`; None if they are not what was written. Raises OSError or one of DAMAGE if they cannot be read.

    Files are hashed (0.7 GB/s) only if their size or time is not what it was when they were written.
    """
    import numpy as np

    about = json.loads((folder / "about.json").read_text())
    if about.pop("check") != check_of(about):
        return None
    now = {name: stamp(folder / f"{name}.npy") for name in about["stamps"]}
    if not now or now not in (about["stamps"], verified.get(folder)):
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in about["stamps"]}
        if digest_of(arrays, about["extra"]) != about["sha256"]:
            return None
        verified[folder] = now
    return Cached(folder, about["sha256"])


def check_of(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def stamp(path: Path) -> list[int]:
    return [path.stat().st_size, path.stat().st_mtime_ns]


def digest_of(parts: Parts, extra: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(extra, sort_keys=True).encode())
    for name, array in parts.items():
        digest.update(f"{name}{array.dtype}{array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()


def write(parts: Parts, extra: dict[str, Any], folder: Path) -> Cached:
    """Writes arrays and plain values into `folder`, which appears whole or not at all."""
    import numpy as np

    arrays = {name: np.ascontiguousarray(values) for name, values in parts.items()}
    with replacing(folder) as part:
        part.mkdir()
        stamps = {}
        for name, array in arrays.items():
            path = part / f"{name}.npy"
            path.parent.mkdir(exist_ok=True)
            try:
                np.save(path, array)
            except OSError as e:  # NumPy's "8 requested and 4 written" has no errno
                code = e.errno or errno.ENOSPC
                raise OSError(code, os.strerror(code), str(path)) from None
            stamps[name] = stamp(path)
        sha256 = digest_of(arrays, extra)
        about = {"sha256": sha256, "extra": extra, "stamps": stamps}
        (part / "about.json").write_text(json.dumps(about | {"check": check_of(about)}))
    return Cached(folder, sha256)
