"""Opens untrusted files safely and writes files atomically. Free of torch."""

import csv
import errno
import json
import os
import re
import shutil
import stat
import tempfile
import time
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from lockstep.errors import UserError, explain_os_error, raise_problems
from lockstep.machine import system

PROBE_BYTES = 2**16
MOST_BYTES = 2**30  # limit for reading a whole file: an untrusted sparse file can have any size


def local_path(text: str) -> Path:
    """The type of a script's argument. Of `s3://bucket/runs`, pathlib would make a local folder `s3:`."""
    if "://" in text:
        raise ArgumentTypeError(f"{text} is a URL, which is not supported. Pass a path, local or in a mounted folder.")
    return Path(text)


# --- Opening files of runs and users ---
#
# These files are untrusted: anyone may have created them. All code opens the files of a run with these functions
# (tests/test_strangers.py).


def open_plain(path: Path, mode: str = "rb", *, follows: bool = False, **options: Any) -> IO[Any]:
    """Opens a regular file.

    `follows` allows links to regular files, for paths that users pass themselves, such as images.

    Raises:
        OSError: `path` is a link, which may point anywhere, or a pipe or a device, which may hang or never end.
    """
    if not follows:
        refuse_link(path)
    safe_flags = system.NO_WAITING | (0 if follows else system.NO_LINKS)

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | safe_flags, 0o666)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", name)

    return open(path, mode, opener=opener, **options)


def open_log(path: Path, mode: str = "ab", **options: Any) -> IO[Any]:
    """Opens a log to append to.

    A log with hard links, such as those of `cp -al`, is replaced by a new file: its copies keep the earlier lines. A
    copy here could fill the disk, which must not end a run.
    """
    if path.is_file() and path.stat().st_nlink > 1:
        path.unlink()
    return open_plain(path, mode, **options)


def read_bytes(path: Path, max_bytes: int = MOST_BYTES, *, follows: bool = False) -> bytes:
    """Reads a whole file. Raises OSError if it has more than `max_bytes` bytes."""
    with open_plain(path, follows=follows) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {max_bytes:,}", str(path))
        return bytes(file.read(size))


def read_text(path: Path, max_bytes: int = MOST_BYTES) -> str:
    return read_bytes(path, max_bytes).decode("utf-8")


def make_folder(path: Path) -> None:
    """Creates a folder of a run, but not its parents, so a removed run folder stays removed. Raises OSError: a link."""
    path.mkdir(exist_ok=True)
    refuse_link(path)


def refuse_odd(*paths: Path) -> None:
    """Raises UserError if a path is a link, a pipe or a device: using it would read or write other files."""
    special = [path for path in paths if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir()))]
    raise_problems(f"{path} is a link, a pipe or a device. Remove it." for path in special)


def refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link; a run folder must not contain links", str(path))


# --- Locks ---


def is_held(path: Path) -> bool:
    """Whether a process holds the lock `path`. The kernel releases the lock however the process ends."""
    from filelock import FileLock, Timeout

    try:
        with open_plain(path) as file:
            if system.WINDOWS:
                FileLock(path, timeout=0).acquire().lock.release()
            else:  # several processes can test the lock, also on a read-only disk
                system.lock_shared(file)
    except OSError as e:  # no file; or a file system without locks
        return isinstance(e, BlockingIOError | Timeout)
    return False


@contextmanager
def locked(path: Path, in_use: str = "", wait_s: float = -1) -> Iterator[None]:
    """Holds the lock `path` within the block, then removes the file. Without effect on a file system without locks.

    Raises:
        UserError: another process still holds the lock after `wait_s` seconds (message: `in_use`), or it is not a file.
    """
    from filelock import FileLock, Timeout

    refuse_odd(path)
    lock = FileLock(path, timeout=wait_s, fallback_to_soft=False)  # a soft lock would outlive a kill
    try:
        if path.exists() and path.stat().st_nlink > 1 and not is_held(path):
            path.unlink()  # filelock truncates the file, and so all its hard links
        lock.acquire()
        while not path.exists():  # the previous holder removed the file after this process opened it
            lock.release()
            lock.acquire()
    except OSError as e:  # the file system has no locks; or a process holds the lock, perhaps of a different user
        if in_use and (isinstance(e, Timeout) or is_held(path)):
            raise UserError(in_use) from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows cannot remove an open file
            path.unlink(missing_ok=True)
        lock.release()


# --- Atomic writes ---

PART, A_DAY_S = ".lockstep-", 86400.0


@contextmanager
def atomic_replace(path: Path, *, over_folder: bool = False) -> Iterator[Path]:
    """Yields the path of a new file or folder, which replaces `path` if the block ends without an error.

    Readers see the old file or the new one, never a part. The new one is written to a hidden folder with a random name
    next to `path`.

    Raises:
        IsADirectoryError: a file would replace a folder. `over_folder` allows that, for checkpoints.
    """
    with part_folder(path.parent) as folder:
        part = folder / path.name
        yield part
        if over_folder or part.is_dir():
            take_place(part, path)
        else:
            part.replace(path)


@contextmanager
def part_folder(folder: Path) -> Iterator[Path]:
    """Yields a new private folder in `folder` for incomplete files, and removes it at the end.

    If the process is killed, the folder stays for a day.
    """
    remove_parts(folder, A_DAY_S)
    with tempfile.TemporaryDirectory(".part", PART, folder, ignore_cleanup_errors=True) as part:
        yield Path(part)


def remove_parts(folder: Path, age_s: float) -> None:
    """Removes folders of `part_folder` that killed processes left and that have not changed for `age_s` seconds."""
    for part in parts_in(folder):
        with suppress(OSError):
            if time.time() - max(path.lstat().st_mtime for path in (part, *part.rglob("*"))) >= age_s:
                remove(part)


def parts_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{PART}????????.part") if path.is_dir() and not path.is_symlink()]


def take_place(part: Path, path: Path) -> None:
    """Moves the file or the folder `part` to `path`.

    A file replaces a file atomically. A folder cannot: for an instant only `<path>.old` exists. checkpoints/finding.py
    looks for it. Only folders of checkpoints are replaced.
    """
    if not part.is_dir() and not (path.is_dir() and not path.is_symlink()):
        part.replace(path)
        return
    old_path = path.with_name(f"{path.name}.old")
    if os.path.lexists(path):
        remove(old_path)  # left by a kill
        path.rename(old_path)
    part.rename(path)
    remove(old_path)


def remove(path: Path) -> None:
    """Removes a file or a folder, if it exists. Removes a link but not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def refuse_unwritable(folder: Path, key: str) -> None:
    """Raises UserError if files cannot be written into `folder`, which need not exist yet. Leaves no files behind."""
    folder = folder.expanduser().absolute()
    with explain_os_error(f"{key}: {folder} cannot be written", f"Set {key} to a writable location with free space."):
        for existing in (folder, *folder.parents):
            with suppress(FileNotFoundError):
                existing.lstat()  # raises a different error if the name is too long
                break
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(bytes(PROBE_BYTES))


def write_text(path: Path, text: str) -> None:
    with atomic_replace(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")  # file names may not be UTF-8


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a table with a header. Missing values are empty, and values without a column are omitted."""
    with atomic_replace(path) as part, part.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, to_json(content) + "\n")


def to_json(value: Any, indent: int | None = 1) -> str:
    """JSON with null for NaN and infinities, which JSON does not have."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=indent)


SURROGATE = re.compile("[\ud800-\udfff]")


def plain_values(value: Any) -> Any:
    """`value` without tensors and arrays, which JSON lacks, and without lone surrogates, which UTF-8 lacks."""
    if isinstance(value, str):
        return SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, Mapping):
        return {str(name): plain_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
