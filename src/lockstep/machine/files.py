"""Opens files of strangers safely, and writes files whole or not at all. Free of torch."""

import csv
import errno
import json
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from lockstep.errors import UserError, raise_problems

PROBE_BYTES = 2**16
MOST_BYTES = 2**30  # of a file that is read whole; a sparse file of a stranger may have any size


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the operating system within the block name `path`: an error of a write names no file."""
    try:
        yield
    except OSError as e:
        e.filename = str(path) if not e.filename or PART in str(e.filename) else e.filename
        raise


# --- Files of a run and of users, opened ---
#
# Anybody may have made them. Everything that opens a file of a run opens it here (tests/test_strangers.py).


def open_plain(path: Path, mode: str = "rb", *, follows: bool = False, **options: Any) -> IO[Any]:
    """A regular file. Raises OSError for a link, which leads anywhere, and for a pipe or a device, which may hang or never end.

    `follows`: for what users name themselves, such as images, which may be links to regular files.
    """
    if not follows:
        refuse_link(path)
    guard = getattr(os, "O_NONBLOCK", 0) | (0 if follows else getattr(os, "O_NOFOLLOW", 0))

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | guard, 0o666)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", name)

    return open(path, mode, opener=opener, **options)


def open_log(path: Path, mode: str = "ab", **options: Any) -> IO[Any]:
    """A log to append to. One with hard links, as `cp -al` makes them, begins anew: a copy may fill the disk, which must end no run."""
    if path.is_file() and path.stat().st_nlink > 1:
        path.unlink()
        with suppress(OSError), open_plain(path, "x") as new:
            new.write(f"The earlier lines of {path.name} stay in its copies, which were hard links to it.\n")
    return open_plain(path, mode, **options)


def read_bytes(path: Path, most: int = MOST_BYTES, *, follows: bool = False) -> bytes:
    """A whole file. Raises OSError: it has more than `most` bytes."""
    with open_plain(path, follows=follows) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {most:,}", str(path))
        return bytes(file.read(size))


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    return read_bytes(path, most).decode("utf-8")


def make_folder(path: Path) -> None:
    """A folder of a run, without its parents: a run's folder that was removed does not come back. Raises OSError for a link."""
    path.mkdir(exist_ok=True)
    refuse_link(path)


def refuse_odd(*paths: Path) -> None:
    """Raises UserError: a path is a link, a pipe or a device, through which other files would be read or written."""
    odd = [path for path in paths if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir()))]
    raise_problems(f"{path} is a link, a pipe or a device. Remove it." for path in odd)


def refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link; a run folder must not contain links", str(path))


# --- Locks: one process at a time ---


def is_held(path: Path) -> bool:
    """Whether a process holds the lock `path`. The kernel releases it when the process ends, in whatever way."""
    try:
        import fcntl

        with open_plain(path) as file:  # shared: several may look, on a disk that they may only read
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (ImportError, OSError) as e:  # on Windows; no file, or a file system without locks
        return isinstance(e, BlockingIOError)
    return False


@contextmanager
def locked(path: Path, in_use: str = "", wait_s: float = -1) -> Iterator[None]:
    """Holds the lock `path` within the block, and removes the file. A file system without locks: goes on without.

    Raises UserError: after `wait_s` seconds another process still has it (`in_use`); or it is not a file.
    """
    from filelock import FileLock, Timeout

    refuse_odd(path)
    lock = FileLock(path, timeout=wait_s, fallback_to_soft=False)  # a soft lock would outlive a kill
    try:
        with suppress(ImportError, FileNotFoundError), open_plain(path, "rb+") as file:
            import fcntl

            # filelock would empty a file with other names. Held, so no other process puts its own there meanwhile.
            if (linked := os.fstat(file.fileno())).st_nlink > 1:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(linked, path.lstat()):
                    path.unlink()
        lock.acquire()
        while not path.exists():  # its last holder removed it after this process had opened it
            lock.release()
            lock.acquire()
    except OSError as e:  # the file system has no locks; or the lock is held, by another user too
        if in_use and (isinstance(e, Timeout | BlockingIOError) or is_held(path)):
            raise UserError(in_use) from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows keeps a file that is open
            path.unlink(missing_ok=True)
        lock.release()


# --- Files that appear whole or not at all ---

PART, A_DAY_S = ".lockstep-", 86400.0


@contextmanager
def replacing(path: Path, *, over_folder: bool = False) -> Iterator[Path]:
    """Yields the path of a new file, which replaces `path` when the block ends without an error; or of a new folder.

    A reader sees the old file or the new one, never a part of it. It is written in a hidden folder of a random name beside `path`.

    Raises IsADirectoryError: a file would replace a folder, and not `over_folder`, as one checkpoint replaces another.
    """
    with naming(path), part_folder(path.parent) as folder:
        yield folder / path.name
        part = folder / path.name
        if not over_folder and not part.is_dir() and path.is_dir() and not path.is_symlink():
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        take_place(part, path)


@contextmanager
def part_folder(folder: Path) -> Iterator[Path]:
    """A new folder in `folder`, which nobody else uses, for what is not complete yet; removed at the end. A kill leaves it for a day."""
    remove_parts(folder, A_DAY_S)
    with tempfile.TemporaryDirectory(".part", PART, folder, ignore_cleanup_errors=True) as part:
        yield Path(part)


def remove_parts(folder: Path, age_s: float) -> None:
    """Removes the folders of `part_folder` that a killed process left, if nothing in them has changed for so long."""
    for part in parts_in(folder):
        with suppress(OSError):
            if time.time() - max(place.lstat().st_mtime for place in (part, *part.rglob("*"))) >= age_s:
                remove(part)


def parts_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{PART}????????.part") if path.is_dir() and not path.is_symlink()]


def take_place(part: Path, path: Path) -> None:
    """Moves the file or the folder `part` to `path`.

    A file replaces a file atomically. A folder cannot: for an instant only `<path>.old` exists, which checkpoints/finding.py looks
    for. Only folders of checkpoints are replaced.
    """
    if not part.is_dir() and not (path.is_dir() and not path.is_symlink()):
        part.replace(path)
        return
    old = path.with_name(f"{path.name}.old")
    if os.path.lexists(path):
        remove(old)  # left by a kill
        path.rename(old)
    part.rename(path)
    remove(old)


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there; of a link, itself."""
    if path.is_dir() and not path.is_symlink():
        try:
            shutil.rmtree(path)
        except OSError as e:
            if e.errno != errno.ENOTEMPTY:
                raise
            shutil.rmtree(path)  # another process has written into it meanwhile
    else:
        path.unlink(missing_ok=True)


def refuse_unwritable(folder: Path, key: str) -> None:
    """Raises UserError if files could not be written into `folder`, which need not exist. Leaves nothing there."""
    place = existing = folder.expanduser().absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        for part in place.relative_to(existing).parts:
            with suppress(FileNotFoundError):
                os.lstat(existing / part)  # raises for a name that is too long
        place = existing
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as e:
        raise UserError(
            f"{key}: {place} cannot be written: {e.strerror}. Type {key}=<a folder with room that is yours>."
        ) from None


def write_text(path: Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")  # names of files may be no UTF-8


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """A table with a heading. What a row lacks is empty, and what has no column is left out."""
    with replacing(path) as part, part.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps({key: finite(value) for key, value in content.items()}, indent=1) + "\n")


def finite(value: Any) -> Any:
    """NaN and infinities as null, which is valid JSON."""
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
