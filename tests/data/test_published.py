"""Where a published data set comes from: found on the disk, fetched, or taken from a package; no network."""

from pathlib import Path

import numpy as np
import pytest
from conftest import write_cifar10, write_mnist
from shipped_data import prepared, raw

from lockstep.data import Cifar10, Mnist, published
from lockstep.data.cache import Parts
from lockstep.data.published import Published
from lockstep.data.sampler import splits, val_count
from lockstep.errors import UserError

CLASSES = {"mnist": Mnist, "cifar10": Cifar10}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    for made in CLASSES.values():
        monkeypatch.setattr(made, "fetch", unreachable)


def unreachable(_: Published) -> None:
    raise ConnectionError("http://mirror/: no route to host")


def write_made_up(dataset: Published) -> None:
    write_mnist(dataset.root, 60, 20)


@pytest.fixture
def root(tmp_path) -> Path:
    return write_mnist(tmp_path / "data", 60, 20)


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def assert_holds(dataset: Published, parts: Parts) -> None:
    for part in ("train", "test"):
        for name, array in getattr(dataset, part).arrays.items():
            assert np.array_equal(array, parts[f"{part}/{name}"]), name


@pytest.mark.parametrize("source", ["auto", "disk"])
@pytest.mark.parametrize("name", CLASSES)
def test_files_on_disk_are_decoded(root, cache, monkeypatch, name, source):
    monkeypatch.setattr(Cifar10, "md5", write_cifar10(root, 4))
    dataset = prepared(root, cache, name, source=source)
    assert dataset.source == "disk"
    assert_holds(dataset, CLASSES[name].read_files(CLASSES[name].find(root)))


@pytest.mark.parametrize("source", ["auto", "download"])
def test_files_that_are_not_there_are_fetched(tmp_path, cache, monkeypatch, source):
    monkeypatch.setattr(Mnist, "fetch", write_made_up)
    dataset = prepared(tmp_path / "data", cache, source=source)
    assert dataset.source == "download"
    assert_holds(dataset, Mnist.read_files(Mnist.find(tmp_path / "data")))


@pytest.mark.parametrize("damaged", ["train-images-idx3-ubyte.gz", "train-images-idx3-ubyte"])
def test_a_download_puts_damaged_files_right(root, cache, monkeypatch, damaged):
    expected = Mnist.read_files(Mnist.find(root))
    content = raw(root, "train-images-idx3-ubyte.gz").read_bytes()
    raw(root, "train-images-idx3-ubyte.gz").unlink()
    raw(root, damaged).write_bytes(content[:100])
    with pytest.raises(UserError, match=r"data\.source=download"):  # what the message says to type helps:
        prepared(root, cache)
    monkeypatch.setattr(Mnist, "fetch", write_made_up)
    assert_holds(prepared(root, cache, source="download"), expected)


def test_mnist_comes_from_its_package_without_files_and_network_or_by_choice(root, tmp_path, cache):
    chosen = prepared(root, cache, source="embedded")
    assert (chosen.source, len(chosen.train), len(chosen.test)) == ("embedded", 4000, 1000)
    dataset = prepared(tmp_path / "missing", cache)
    assert (dataset.source, len(dataset.train), len(dataset.test)) == ("embedded", 4000, 1000)
    assert "EMBEDDED SUBSET of 5,000 images (4,000 to train and validate, 1,000 to test)" in dataset.notice
    assert_holds(dataset, published.read_embedded(published.embedded_file()))


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("folder", "state"), [("missing", "does not exist"), (".", "does not contain")])
def test_a_folder_without_the_files_and_what_it_should_hold_are_named(tmp_path, cache, name, folder, state):
    with pytest.raises(UserError, match=rf"data\.root={tmp_path / folder} {state}.*Set data\.root=<folder>") as error:
        prepared(tmp_path / folder, cache, name, source="disk")
    assert all(file in str(error.value) for file in CLASSES[name].md5)


@pytest.mark.parametrize(("name", "source"), [("mnist", "download"), ("cifar10", "download"), ("cifar10", "auto")])
def test_without_network_another_folder_is_asked_for(tmp_path, cache, name, source):
    with pytest.raises(UserError, match=r"Set data\.root=<folder>") as error:
        prepared(tmp_path, cache, name, source=source)
    assert f"data.root={tmp_path} " in str(error.value)
    assert "no route to host" in str(error.value)


@pytest.mark.parametrize(("limit_train", "val_fraction", "possible"), [(None, 0.1, 54), (20, 0.1, 20), (None, 0.5, 30)])
def test_a_batch_larger_than_the_training_set_is_refused(root, cache, limit_train, val_fraction, possible):
    dataset, how = prepared(root, cache), {"val_fraction": val_fraction, "limit_train": limit_train}
    with pytest.raises(UserError, match=rf"data\.batch_size=55 .*Set data\.batch_size={possible} or less"):
        splits(dataset, batch_size=55, **how)
    train, val, test = splits(dataset, batch_size=possible, **how)
    assert (train.count, val.count, test.count) == (possible, 60 * val_fraction, 20)
    assert not set(train.indices(np.arange(train.count))) & set(val.indices(np.arange(val.count)))


@pytest.mark.parametrize(("train", "fraction", "expected"), [(60_000, 0.1, 6000), (640, 0.1, 64), (3, 0.01, 1)])
def test_at_least_one_image_is_kept_for_validation(train, fraction, expected):
    assert val_count(train, fraction) == expected
