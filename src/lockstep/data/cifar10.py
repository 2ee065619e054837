"""CIFAR-10 in its published form: the "python version".

Checksums are the published ones, as torchvision has them (torchvision/datasets/cifar.py).
"""

import pickle
import tarfile
from pathlib import Path

from lockstep.data.cache import Parts
from lockstep.data.download import download, md5
from lockstep.data.published import Published
from lockstep.errors import UserError

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
