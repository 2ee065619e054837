"""Files are fetched whole or not at all, from the first mirror that has them (a server made here)."""

import hashlib
import io
import socket
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from conftest import write_cifar10, write_mnist

from lockstep.data import Cifar10, Mnist, published
from lockstep.data.cache import hash_of
from lockstep.data.published import download

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


def test_good_content_lands_at_its_path_alone(server, tmp_path):
    server.content["/a"] = CONTENT
    download([server.url("/a")], tmp_path / "new" / "folder" / "a", CHECKSUM)
    assert (tmp_path / "new" / "folder" / "a").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["a"]


@pytest.mark.parametrize("first", ["dead", "/missing", "/other", "/broken/a"])
def test_the_second_mirror_stands_in_for_the_first(server, dead_url, tmp_path, first):
    server.content |= {"/a": CONTENT, "/other": b"<html>Moved</html>", "/broken/a": CONTENT}
    mirrors = [dead_url if first == "dead" else server.url(first), server.url("/a")]
    download(mirrors, tmp_path / "a", CHECKSUM)
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert server.asked[-1] == "/a"


def test_every_mirror_is_named_when_none_helps_and_nothing_is_kept(server, dead_url, tmp_path):
    server.content["/other"] = CONTENT + b"!"
    mirrors = [dead_url, server.url("/missing"), server.url("/other")]
    with pytest.raises(ConnectionError, match=r"/other: wrong checksum") as error:
        download(mirrors, tmp_path / "a", CHECKSUM)
    assert all(mirror in str(error.value) for mirror in mirrors)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("there", "asked"), [(CONTENT, []), (CONTENT[:1000], ["/a"])])
def test_a_half_written_file_is_replaced_and_a_right_one_is_not_fetched_again(server, tmp_path, there, asked):
    server.content["/a"] = CONTENT
    (tmp_path / "a").write_bytes(there)
    download([server.url("/a")], tmp_path / "a", CHECKSUM)
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert server.asked == asked


def fetch_mnist(root: Path) -> None:
    Mnist(root=str(root), image_size=28).fetch()


def fetch_cifar10(root: Path) -> None:
    Cifar10(root=str(root), image_size=32).fetch()


@pytest.fixture
def served_mnist(server, dead_url, tmp_path, monkeypatch) -> Path:
    """A folder with made-up MNIST files, which the second mirror serves."""
    folder = write_mnist(tmp_path / "made", 20, 10) / "MNIST" / "raw"
    server.content |= {f"/mnist/{name}": (folder / name).read_bytes() for name in Mnist.md5}
    monkeypatch.setattr(published, "MNIST_MIRRORS", (dead_url, server.url("/mnist/")))
    monkeypatch.setattr(Mnist, "md5", {name: hash_of(folder / name, "md5") for name in Mnist.md5})
    return folder


def test_mnist_is_fetched_to_where_it_is_looked_for_and_again_only_where_it_is_damaged(served_mnist, server, tmp_path):
    root = tmp_path / "data"
    fetch_mnist(root)
    fetched, made = Mnist.read_files(Mnist.find(root)), Mnist.read_files(Mnist.find(served_mnist))
    assert np.array_equal(fetched["train/input"], made["train/input"])
    assert np.array_equal(fetched["test/target"], made["test/target"])
    server.asked.clear()
    path = root / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:100])
    fetch_mnist(root)
    assert server.asked == [f"/mnist/{path.name}"]
    assert path.read_bytes() == (served_mnist / path.name).read_bytes()


@pytest.fixture
def served_cifar10(server, tmp_path, monkeypatch) -> Path:
    """A folder with made-up CIFAR-10 files, whose archive the server has."""
    made = tmp_path / "made"
    monkeypatch.setattr(Cifar10, "md5", write_cifar10(made, 3))
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        tar.add(made / Cifar10.folders[0], Cifar10.folders[0])
    server.content["/cifar.tar.gz"] = archive.getvalue()
    monkeypatch.setattr(published, "CIFAR10_URL", server.url("/cifar.tar.gz"))
    monkeypatch.setattr(published, "CIFAR10_TAR_MD5", hashlib.md5(archive.getvalue()).hexdigest())
    return made


def test_cifar10_is_unpacked_to_where_it_is_looked_for_and_again_without_the_network(served_cifar10, server, tmp_path):
    root, made = tmp_path / "data", Cifar10.read_files(Cifar10.find(served_cifar10))
    for _ in range(2):
        fetch_cifar10(root)
        fetched = Cifar10.read_files(Cifar10.find(root))
        assert np.array_equal(fetched["train/input"], made["train/input"])
        assert np.array_equal(fetched["test/target"], made["test/target"])
        (root / Cifar10.folders[0] / "data_batch_2").write_bytes(b"half")  # a damaged file
    assert server.asked == ["/cifar.tar.gz"]


def test_cifar10_without_a_network_leaves_nothing(dead_url, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(published, "CIFAR10_URL", dead_url)
    with pytest.raises(ConnectionError, match=dead_url):
        fetch_cifar10(tmp_path / "data")
    assert not list(tmp_path.iterdir())
