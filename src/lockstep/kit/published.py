"""Published data sets, read from disk, downloaded or taken from a package, and decoded once per machine."""

import gzip
import hashlib
import math
import zlib
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lockstep import Arrays, UserError, files
from lockstep.kit.cache import Cached, Parts, cache_folder, decode_once, key_of, one_download
from lockstep.kit.images import Images
from lockstep.kit.listing import SHOWN, explain_root_error
from lockstep.kit.pixels import ENDINGS, JUNK, file_name_text

# --- Downloads files from mirrors and verifies their checksums ---

TIMEOUT_S = 10
DEFAULT_ROOT = Path("data")  # the default of the configs, where files are downloaded without asking


def download(urls: list[str], path: Path, checksum: str) -> bytes:
    """The content of `path`, whose MD5 is `checksum`. Downloads it from the first url that works, unless it exists.

    Raises:
        ConnectionError: no url could be read, or none has this checksum. `path` then does not exist.
    """
    if path.is_file() and hashlib.md5(content := files.read_bytes(path, follows=True)).hexdigest() == checksum:
        return content
    import http.client  # here, because importing them would slow the config check, which imports this module, by 0.05 s
    import urllib.request

    reasons = []
    for url in urls:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
                content = response.read()
        except (OSError, http.client.HTTPException) as e:
            reasons.append(f"{url}: {getattr(e, 'reason', e)}")
            continue
        if hashlib.md5(content).hexdigest() == checksum:
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.atomic_replace(path) as part:
                part.write_bytes(content)
            return bytes(content)
        reasons.append(f"{url}: wrong checksum")
    raise ConnectionError("; ".join(reasons))


# --- The idx format of MNIST and similar data sets ---

MOST_BYTES = 2**31  # largest file; MNIST's are up to 47 MB


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Reads an idx file (http://yann.lecun.com/exdb/mnist/) of unsigned bytes, `.gz` or plain.

    Raises:
        UserError: the file is truncated, not an idx file, or cannot be read.
    """
    try:
        with files.open_plain(path, follows=True) as plain, gzip.open(plain) if path.suffix == ".gz" else plain as file:
            header = file.read(4)
            if len(header) < 4 or header[:3] != b"\0\0\x08" or not header[3]:
                raise ValueError("no idx header")
            shape = np.frombuffer(file.read(4 * header[3]), ">u4", header[3]).tolist()
            content = file.read(min(math.prod(shape), MOST_BYTES) + 1)  # a damaged header may declare any size
        return np.frombuffer(content, np.uint8).reshape(shape)
    except (EOFError, OSError, ValueError, zlib.error) as e:
        raise UserError(
            f"{path} is truncated, damaged or unreadable ({getattr(e, 'strerror', None) or e}). Replace it, or set data.source=download."
        ) from None


# --- Describes the contents of data.root for messages ---


def folder_contents(root: Path, ignored: Collection[str] = ()) -> tuple[list[str], str]:
    """The names in the folder `root`, without hidden and `ignored` ones, and a description of them."""
    if root.is_file():
        return [root.name], "is a file"
    names = [file_name_text(path.name) for path in sorted(root.glob("[!.]*")) if path.name not in ignored]
    return names, f"has {', '.join(names[:SHOWN]) or 'no files'}" if root.is_dir() else "does not exist"


def has_photos(root: Path) -> bool:
    """Whether all folders in `root`, or `root` if it has none, contain images. Published data sets nest them deeper."""
    folders = [path for path in root.glob("[!.]*") if path.is_dir() and not JUNK.match(path.name)] or [root]
    return all(any(path.suffix.lower() in ENDINGS for path in folder.glob("*")) for folder in folders)


# --- The base class ---


class Published(Images):
    """A subclass names its files and defines how to read and download them.

    Raises:
        UserError: the data is missing or damaged.
    """

    name: ClassVar[str]
    folders: ClassVar[tuple[str, ...]]  # folders below `root` that may contain the files; downloads go to the first
    md5: ClassVar[Mapping[str, str]]  # of each file, as in torchvision; .gz files may also exist unpacked
    archive: ClassVar[str] = ""  # the archive that is downloaded to `root` and unpacked, if any
    embedded = False  # whether a package contains a subset, which `embedded_files` returns

    def __init__(self, *, root: str, source: str = "auto", cache_dir: str | None = None, **images: Any) -> None:
        super().__init__(**images)
        self.root, self.asked, self.cache = Path(root).expanduser(), source, cache_folder(cache_dir)

    @classmethod
    def find(cls, root: Path) -> list[Path] | None:
        """The files below `root`, all in one folder; None if any is missing."""
        for folder in (root / name for name in cls.folders):
            choices = [(folder / name, folder / name.removesuffix(".gz")) for name in cls.md5]
            files = [path for paths in choices if (path := next((p for p in paths if p.is_file()), None))]
            if len(files) == len(choices):
                return files
        return None

    @classmethod
    def read_files(cls, files: list[Path]) -> Parts:
        raise NotImplementedError

    def fetch(self) -> None:
        """Downloads missing or damaged files to `root`. Raises OSError."""
        raise NotImplementedError

    @classmethod
    def embedded_files(cls) -> list[Path]:
        """Raises UserError if the package is not installed."""
        raise NotImplementedError

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        yield from super().problems(data)
        if data.get("source") == "embedded" and not cls.embedded:
            yield f"data.source=embedded: no package contains {cls.name}. Set data.root=<folder>, or data.source=download."

    def prepare(self) -> None:
        if self.cached and self.source == "embedded" and self.asked == "auto":
            self.notice = f"no {self.name} in data.root={self.root}, and no mirror is reachable: using the EMBEDDED SUBSET of {len(self.train) + len(self.test):,} images. Set data.root=<folder> for the full data set."

    @cached_property
    def cached(self) -> Cached:
        self.source, files = self.locate()
        kind = "embedded" if self.source == "embedded" else "disk"
        return decode_once(self.cache / key_of(self.name, files, kind), lambda: (self.read_files(files), {}))

    def locate(self) -> tuple[str, list[Path]]:
        """The source of the data and its files."""
        root, needs = self.root, f"{self.folders[0]}/{', '.join(self.md5)}"
        if self.asked in ("auto", "disk"):
            with explain_root_error(root):
                if files := self.find(root):
                    return "disk", files
                # may be an unfinished download, perhaps of a different process
                ignored = (self.folders[0].partition("/")[0], self.archive)
                names, state = folder_contents(root, ignored)
                is_users_folder = root != DEFAULT_ROOT or root.is_file() or has_photos(root)
            if self.asked == "disk" or (names and is_users_folder):
                raise UserError(
                    f"data.root={root} {state}; it should contain {needs}. Set data.root=<folder>, or data.source=download; for your own images, set data=folder data.root={root}."
                )
        if self.asked != "embedded":
            try:
                with one_download(self.cache, self.name, root):
                    self.fetch()
                return "download", self.find(root) or []
            except OSError as e:
                if self.asked == "download" or not self.embedded:
                    raise UserError(
                        f"{self.name} is not in data.root={root} and could not be downloaded ({e}). Set data.root=<a folder with {needs}>."
                    ) from None
        return "embedded", self.embedded_files()

    def open_part(self, part: str) -> Arrays | None:
        arrays = self.cached.arrays(part)
        return Arrays(input=arrays["input"], target=arrays["target"].astype("int64")) if arrays else None

    @property
    def fingerprint(self) -> str:  # type: ignore[override]  # computed when the data was decoded
        return self.cached.unchanged().sha256
