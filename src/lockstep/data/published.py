"""Published data sets: found on disk, downloaded, or taken from a package; decoded once per machine."""

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

from lockstep.data.cache import Cached, Parts, cache_folder, decoded, key_of, one_download
from lockstep.data.dataset import Arrays
from lockstep.data.images import Images
from lockstep.data.listing import SHOWN, reading
from lockstep.data.pixels import ENDINGS, JUNK, spelled
from lockstep.errors import UserError
from lockstep.machine.files import open_plain, read_bytes, replacing

# --- Downloads files from mirrors and keeps them only with the right checksum ---

TIMEOUT_S = 10
DEFAULT_ROOT = Path("data")  # of the configs: downloads go there unasked


def download(urls: list[str], path: Path, checksum: str) -> bytes:
    """The content with the MD5 `checksum` of the file `path`, downloaded to it from the first url that has it unless it is there already.

    Raises:
        ConnectionError: no url could be read, or none had the right content. `path` then does not exist.
    """
    if path.is_file() and hashlib.md5(content := read_bytes(path, follows=True)).hexdigest() == checksum:
        return content
    import http.client  # here, because they take 0.05 s of the config check, which imports this module
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
            with replacing(path) as part:
                part.write_bytes(content)
            return bytes(content)
        reasons.append(f"{url}: wrong checksum")
    raise ConnectionError("; ".join(reasons))


# --- The format of MNIST and its kin ---

MOST_BYTES = 2**31  # of a file; MNIST's are 47 MB


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An idx file (http://yann.lecun.com/exdb/mnist/), `.gz` or plain, of unsigned bytes.

    Raises:
        UserError: the file is cut off, not an idx file, or cannot be read.
    """
    try:
        with open_plain(path, follows=True) as plain, gzip.open(plain) if path.suffix == ".gz" else plain as file:
            header = file.read(4)
            if len(header) < 4 or header[:3] != b"\0\0\x08" or not header[3]:
                raise ValueError("no idx header")
            shape = np.frombuffer(file.read(4 * header[3]), ">u4", header[3]).tolist()
            content = file.read(min(math.prod(shape), MOST_BYTES) + 1)  # no more than it says, which may be anything
        return np.frombuffer(content, np.uint8).reshape(shape)
    except (EOFError, OSError, ValueError, zlib.error) as e:
        raise UserError(
            f"{path} is cut off or damaged, or cannot be read ({getattr(e, 'strerror', None) or e}). Replace it, or set data.source=download."
        ) from None


# --- What is where the data should be ---


def contents(root: Path, own: Collection[str] = ()) -> tuple[list[str], str]:
    """What is in the folder `root`, without junk and `own`, and the same in words."""
    if root.is_file():
        return [root.name], "is a file"
    there = [spelled(path.name) for path in sorted(root.glob("[!.]*")) if path.name not in own]
    return there, f"has {', '.join(there[:SHOWN]) or 'no files'}" if root.is_dir() else "does not exist"


def has_photos(root: Path) -> bool:
    """Whether images lie in all of its folders, or in itself if it has none: no published data set has them so high up."""
    folders = [path for path in root.glob("[!.]*") if path.is_dir() and not JUNK.match(path.name)] or [root]
    return all(any(path.suffix.lower() in ENDINGS for path in folder.glob("*")) for folder in folders)


# --- The base class: found on disk, downloaded, or taken from a package; decoded once per machine ---


class Published(Images):
    """A subclass names its files and defines how they are read and downloaded.

    Raises:
        UserError: the data is not there, or it is damaged.
    """

    name: ClassVar[str]
    folders: ClassVar[tuple[str, ...]]  # below `root`, where the files may be; downloads go to the first
    md5: ClassVar[Mapping[str, str]]  # of each file, as torchvision has them; packed files may also be there unpacked
    archive: ClassVar[str] = ""  # what is downloaded to `root` to be unpacked there, if it is that
    embedded = False  # whether a package contains a subset: then `embedded_files` finds it

    def __init__(self, *, root: str, source: str = "auto", cache_dir: str | None = None, **images: Any) -> None:
        super().__init__(**images)
        self.root, self.asked, self.cache = Path(root).expanduser(), source, cache_folder(cache_dir)

    @classmethod
    def find(cls, root: Path) -> list[Path] | None:
        """The files below `root`, all from one folder; None if one is missing."""
        for folder in (root / name for name in cls.folders):
            either = [(folder / name, folder / name.removesuffix(".gz")) for name in cls.md5]
            files = [path for paths in either if (path := next((each for each in paths if each.is_file()), None))]
            if len(files) == len(either):
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
        """Raises UserError: the package is not installed."""
        raise NotImplementedError

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        yield from super().problems(data)
        if data.get("source") == "embedded" and not cls.embedded:
            yield f"data.source=embedded: no package contains {cls.name}. Set data.root=<folder>, or data.source=download."

    def prepare(self) -> None:
        if self.cached and self.source == "embedded" and self.asked == "auto":
            self.notice = f"no {self.name} in data.root={self.root}, and no mirror answers: using the EMBEDDED SUBSET of {len(self.train) + len(self.test):,} images ({len(self.train):,} to train and validate, {len(self.test):,} to test). Set data.root=<folder> for the whole set."

    @cached_property
    def cached(self) -> Cached:
        self.source, files = self.locate()
        kind = "embedded" if self.source == "embedded" else "disk"
        return decoded(self.cache / key_of(self.name, files, kind), lambda: (self.read_files(files), {}))

    def locate(self) -> tuple[str, list[Path]]:
        """The source of the data, and its files."""
        root, needs = self.root, f"{self.folders[0]}/{', '.join(self.md5)}"
        if self.asked in ("auto", "disk"):
            with reading(root):
                if files := self.find(root):
                    return "disk", files
                # an unfinished download, perhaps of another process
                own = (self.folders[0].partition("/")[0], self.archive)
                there, state = contents(root, own)
                typed = root != DEFAULT_ROOT or root.is_file() or has_photos(root)
            if self.asked == "disk" or (there and typed):
                raise UserError(
                    f"data.root={root} {state}; it should contain {needs}. Set data.root=<folder>, or data.source=download; for images of your own, data=folder data.root={root}."
                )
        if self.asked != "embedded":
            try:
                with one_download(self.cache, self.name, root):
                    self.fetch()
                return "download", self.find(root) or []
            except OSError as e:
                if self.asked == "download" or not self.embedded:
                    raise UserError(
                        f"{self.name} is not in data.root={root} and could not be fetched ({e}). Set data.root=<folder> for a folder with {needs}."
                    ) from None
        return "embedded", self.embedded_files()

    def open_part(self, part: str) -> Arrays | None:
        arrays = self.cached.arrays(part)
        return Arrays(input=arrays["input"], target=arrays["target"].astype("int64")) if arrays else None

    @property
    def fingerprint(self) -> str:  # type: ignore[override]  # decoding has computed it
        return self.cached.unchanged().sha256
