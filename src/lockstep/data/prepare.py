"""From files to arrays on disk, once per machine: every process maps the same pages, so n processes use one copy.

Free of torch, so that a wrong folder or a damaged file is reported before anything heavy starts.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock
from omegaconf import DictConfig

from lockstep.data import files
from lockstep.data.files import Arrays
from lockstep.errors import UserError

NAMES = ("train_images", "train_labels", "test_images", "test_labels")
FORMAT = 1  # of the cache; raise it when the arrays change


@dataclass(frozen=True)
class Format:
    """How a data set is found, read and fetched, and what its images are."""

    find: Callable[[Path], list[Path] | None]
    read: Callable[[list[Path]], Arrays]
    fetch: Callable[[Path], None]
    needs: str  # what a folder must hold, in words
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]


FORMATS = {
    "mnist": Format(
        files.mnist_files, files.read_mnist, files.fetch_mnist, "MNIST/raw/train-images-idx3-ubyte.gz and its three companions", (0.1307,), (0.3081,),
        tuple("0123456789"),
    ),
    "cifar10": Format(
        files.cifar10_files, files.read_cifar10, files.fetch_cifar10, "cifar-10-batches-py/data_batch_1 to 5 and test_batch",
        (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """A decoded data set in the cache."""

    folder: Path
    source: str
    sha256: str  # of the decoded arrays: the same for compressed and plain files
    train: int
    test: int

    @property
    def images_bytes(self) -> int:
        return sum((self.folder / f"{part}_images.npy").stat().st_size for part in ("train", "test"))

    def array(self, name: str) -> np.memmap:
        """One of `NAMES`, mapped, not read."""
        array: np.memmap = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        return array


def default_cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
    try:
        base.mkdir(parents=True, exist_ok=True)
        return base
    except OSError:  # a home that cannot be written, as in some containers
        return Path(tempfile.gettempdir()) / f"lockstep-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"


def prepare(data: DictConfig) -> Prepared:
    """Finds, fetches if it must, and decodes the data set of a config's `data` node. Cheap when that is done already.

    Raises:
        UserError: the data is not there, damaged, or too small for the batch.
    """
    form, root = FORMATS[data.name], Path(data.root).expanduser()
    cache = Path(data.cache_dir).expanduser() if data.cache_dir else default_cache()
    source, paths = locate(data.name, form, root, data.source, cache)
    prepared = decode(data.name, form, source, paths, cache)
    train = prepared.train - val_count(prepared.train, data.val_fraction)
    train = min(train, data.limit_train or train)
    if data.batch_size > train:
        raise UserError(
            f"data.batch_size={data.batch_size} is more than the {train} training images of {data.name} ({source}). Type data.batch_size={train} or less."
        )
    return prepared


def val_count(train: int, fraction: float) -> int:
    """How many of `train` images are kept for validation: at least one."""
    return max(1, round(train * fraction))


def locate(name: str, form: Format, root: Path, source: str, cache: Path) -> tuple[str, list[Path]]:
    """Where the data comes from, and its files."""
    found = form.find(root) if source in ("auto", "disk") else None
    if found:
        return "disk", found
    if source == "disk":
        state = "has not got" if root.is_dir() else "does not exist; it should hold"
        raise UserError(f"data.root={root} {state} {form.needs}. Type data.root=<folder>, or data.source=download.")
    if source in ("auto", "download"):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(cache / f".{key_of(name, str(root.resolve()), [])}.lock"):  # two runs, one download
                form.fetch(root)  # what is there and right stays
            return "download", form.find(root) or []
        except OSError as e:
            reason = str(e)
        if source == "download" or name != "mnist":
            raise UserError(
                f"{name} is not in data.root={root} and could not be fetched ({reason}). "
                f"Type data.root=<folder> for a folder with {form.needs}."
            )
    return "embedded", [files.embedded_file()]


def key_of(name: str, source: str, paths: list[Path]) -> str:
    """Names a cache folder by the files it was made from, so that a changed file makes a new one."""
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return f"{name}-{hashlib.sha256(repr((FORMAT, source, stats)).encode()).hexdigest()[:16]}"


def decode(name: str, form: Format, source: str, paths: list[Path], cache: Path) -> Prepared:
    """The decoded arrays, from the cache or made now; one process makes them while others wait."""
    folder = cache / key_of(name, "embedded" if source == "embedded" else "disk", paths)
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                arrays = files.read_embedded(paths[0]) if source == "embedded" else form.read(paths)
                write(arrays, folder)
    about = json.loads((folder / "about.json").read_text())
    return Prepared(folder, source, about["sha256"], about["train"], about["test"])


def write(arrays: Arrays, folder: Path) -> None:
    """Writes the arrays and what they are into `folder`, which appears whole or not at all."""
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        digest = hashlib.sha256()
        for name in NAMES:
            array = np.ascontiguousarray(getattr(arrays, name))
            digest.update(f"{name}{array.shape}".encode())
            digest.update(array.data)
            np.save(part / f"{name}.npy", array)
        about = {"sha256": digest.hexdigest(), "train": len(arrays.train_labels), "test": len(arrays.test_labels)}
        (part / "about.json").write_text(json.dumps(about))
        part.chmod(0o755)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
