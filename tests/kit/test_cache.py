"""Data is decoded once per machine: by one process, whole or not at all."""

import gzip
import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import write_idx, write_mnist
from pictures import write_classes
from shipped_data import arrays, die_while_writing, prepare_at_once, prepared, raw

from lockstep.errors import DataChanged, UserError
from lockstep.kit import Folder
from lockstep.kit import cache as cache_module
from lockstep.kit.cache import Parts, cache_folder
from project.data import Mnist

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def root(tmp_path) -> Path:
    return write_mnist(tmp_path / "data", 60, 20)


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def same(found: Parts, expected: Parts) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


def decoded(root: Path) -> Parts:
    return Mnist.read_files(Mnist.find(root))


def unwanted(*_: object) -> Parts:
    raise AssertionError("the files were read again")


def test_files_are_read_once_and_mapped(root, cache, monkeypatch):
    first = prepared(root, cache)
    assert isinstance(first.train.arrays["input"], np.memmap)
    assert first.train.arrays["target"].dtype == first.test.arrays["target"].dtype == np.int64
    assert same(arrays(first.cached), decoded(root))
    assert not any(array.flags.writeable for array in arrays(first.cached).values())
    monkeypatch.setattr(Mnist, "read_files", unwanted)
    assert prepared(root, cache).cached == first.cached
    assert folders(cache) == [first.cached.folder]


@pytest.mark.parametrize("change", ["time", "size", "content"])
def test_a_file_written_anew_makes_a_new_entry_with_the_checksum_of_its_data(root, cache, change):
    before = prepared(root, cache).cached
    path = raw(root, "t10k-labels-idx1-ubyte.gz")
    stat = path.stat()
    if change == "content":
        write_idx(path, np.arange(20, dtype=np.uint8) % 10)
    elif change == "size":
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), 0))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 2_000_000_000 * (change != "size")))
    after = prepared(root, cache).cached
    assert after.folder != before.folder
    assert (after.sha256 != before.sha256) == (change == "content")
    if change == "content":
        assert after.arrays("test")["target"].tolist() == [*range(10)] * 2


def test_a_writer_that_is_killed_leaves_no_half_entry(root, cache):
    process = SPAWN.Process(target=die_while_writing, args=(root, cache))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    (part,) = folders(cache)
    assert part.suffix == ".part"
    for place in (*part.rglob("*"), part):
        os.utime(place, (1, 1))  # younger ones may be another process's
    found = prepared(root, cache).cached
    assert same(arrays(found), decoded(root))
    assert folders(cache) == [found.folder]


def test_processes_that_prepare_at_once_get_the_same_arrays_of_one_folder(root, cache):
    barrier, results = SPAWN.Barrier(3), SPAWN.Queue()
    processes = [SPAWN.Process(target=prepare_at_once, args=(root, cache, barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    got = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert not [error for error in got if isinstance(error, Exception)]
    assert folders(cache) == [got[0][0].folder]
    assert all(cached == got[0][0] and same(found, decoded(root)) for cached, found in got)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    # As if the file was changed a second later: a file system's clock may be that coarse.
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


@pytest.mark.parametrize("damage", [
    lambda folder: flip(folder / "train" / "input.npy", -100), lambda folder: (folder / "test" / "target.npy").unlink(),
    lambda folder: (folder / "test" / "input.npy").write_bytes(b"\x93NUMPY"),
    lambda folder: (folder / "about.json").write_text("{"), lambda folder: flip(folder / "about.json", 20),
], ids=["bit", "file", "cut off", "about", "sha256"])  # fmt: skip
def test_a_damaged_cache_is_decoded_again_with_a_warning(root, cache, damage, capsys):
    first = prepared(root, cache).cached
    damage(first.folder)
    second = prepared(root, cache).cached
    assert second == first
    assert same(arrays(second), decoded(root))
    assert f"the decoded data in {first.folder} is damaged and will be decoded again" in capsys.readouterr().err


def test_data_that_is_changed_under_a_run_is_noticed_once_and_cheaply(root, cache, monkeypatch):
    data = prepared(root, cache)
    before = data.fingerprint
    os.utime(data.cached.folder / "train" / "input.npy")  # as in a copy of the cache
    assert data.fingerprint == before
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "digest_of", unwanted)
        assert data.fingerprint == before  # not hashed again
        patch.setattr(cache_module, "verified", {})  # another process
        with pytest.raises(AssertionError):
            prepared(root, cache)
    flip(data.cached.folder / "train" / "input.npy", -100)
    with pytest.raises(DataChanged, match=str(data.cached.folder)):
        _ = data.fingerprint
    shutil.rmtree(data.cached.folder)
    assert data.fingerprint == before  # what is mapped stays


# The standard: empty is as good as not set. A file cannot be written into.
@pytest.mark.parametrize(
    ("xdg", "expected"), [("", "home/.cache/lockstep"), ("xdg", "xdg/lockstep"), ("file", "temporary/*")]
)
def test_the_cache_is_in_the_users_cache_folder_or_among_the_temporary_files(tmp_path, monkeypatch, xdg, expected):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_CACHE_HOME", xdg and str(tmp_path / xdg))
    assert cache_folder(None).match(str(tmp_path / expected))


@pytest.mark.parametrize("decode", ["cache", "workers"])
def test_a_full_disk_is_an_error_for_people(root, tmp_path, cache, monkeypatch, decode):
    """NumPy's error has no number."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def fail_at_the_test_part(path, array):
        np.repeat(array, 99).tofile("/dev/full") if path.parent.name == "test" else save(path, array)

    photos = Folder(root=str(write_classes(tmp_path / "photos", 3)), image_size=8, cache_dir=str(cache), decode=decode)
    with monkeypatch.context() as patch:
        patch.setattr("lockstep.kit.folder.TemporaryFile", lambda **_: Path("/dev/full").open("r+b", buffering=0))
        patch.setattr(Path, "write_text", full)
        with pytest.raises(UserError, match=r"data.cache_dir=.* cannot be written: .*No space left on device"):
            photos.prepare()
    save = np.save
    monkeypatch.setattr(np, "save", fail_at_the_test_part)
    with pytest.raises(UserError, match=r"data.cache_dir=.* requested and \d+ written.* Free some space, or set"):
        prepared(root, cache)
    assert not folders(cache)
