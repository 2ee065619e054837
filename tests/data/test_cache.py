"""Data is decoded once per machine: by one process, whole or not at all."""

import gzip
import multiprocessing
import os
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import write_idx, write_mnist
from filelock import FileLock
from pictures import write_classes
from shipped_data import arrays, die_while_writing, prepare_at_once, prepared, raw

from lockstep.data import Folder, Mnist, published
from lockstep.data import cache as cache_module
from lockstep.data.cache import Parts, cache_folder
from lockstep.errors import DataChanged, UserError

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


def test_the_arrays_are_mapped_and_cannot_be_changed(root, cache):
    dataset = prepared(root, cache)
    assert isinstance(dataset.train.arrays["input"], np.memmap)
    assert dataset.train.arrays["target"].dtype == dataset.test.arrays["target"].dtype == np.int64
    found = arrays(dataset.cached)
    assert same(found, decoded(root))
    for array in found.values():
        assert isinstance(array, np.memmap)
        assert array.dtype == np.uint8
        assert not array.flags.writeable


@pytest.mark.parametrize("source", ["disk", "embedded"])
def test_files_are_read_once(root, cache, monkeypatch, source):
    first = prepared(root, cache, source=source)
    monkeypatch.setattr(Mnist, "read_files", unwanted)
    monkeypatch.setattr(published, "read_embedded", unwanted)
    second = prepared(root, cache, source=source)
    assert (second.cached, second.source) == (first.cached, source)
    assert folders(cache) == [first.cached.folder]


def test_fetched_files_are_read_once_wherever_they_came_from(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(Mnist, "fetch", lambda dataset: write_mnist(dataset.root, 60, 20))
    fetched = prepared(tmp_path / "data", cache)
    monkeypatch.setattr(Mnist, "read_files", unwanted)
    found = prepared(tmp_path / "data", cache)
    assert (fetched.source, found.source) == ("download", "disk")
    assert found.cached == fetched.cached


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


def test_the_checksum_tells_data_apart_not_files(root, tmp_path, cache):
    compressed = prepared(root, cache)
    plain = shutil.copytree(root, tmp_path / "plain")
    for path in list((plain / "MNIST" / "raw").iterdir()):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert prepared(plain, cache).fingerprint == compressed.fingerprint
    other = write_mnist(tmp_path / "other", 60, 21)
    assert prepared(other, cache).fingerprint != compressed.fingerprint


def test_a_damaged_file_leaves_nothing_in_the_cache(root, cache):
    path = raw(root, "t10k-images-idx3-ubyte.gz")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(UserError, match=re.escape(str(path))):
        prepared(root, cache)
    assert not folders(cache)
    path.write_bytes(whole)
    assert len(prepared(root, cache).train) == 60


def test_a_writer_that_is_killed_leaves_no_half_entry(root, cache):
    process = SPAWN.Process(target=die_while_writing, args=(root, cache))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    assert [path.suffix for path in folders(cache)] == [".part"]
    found = prepared(root, cache).cached
    assert same(arrays(found), decoded(root))
    assert folders(cache) == [found.folder]


def test_processes_that_prepare_at_once_get_the_same_arrays_of_one_folder(root, cache):
    barrier, results = SPAWN.Barrier(4), SPAWN.Queue()
    processes = [SPAWN.Process(target=prepare_at_once, args=(root, cache, barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    got = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert not [error for error in got if isinstance(error, Exception)]
    assert folders(cache) == [got[0][0].folder]
    assert all(cached == got[0][0] and same(found, decoded(root)) for cached, found in got)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip(folder / "train" / "input.npy", -100),
        lambda folder: zero(folder / "train" / "target.npy"),
        lambda folder: (folder / "test" / "target.npy").unlink(),
        lambda folder: (folder / "test" / "input.npy").write_bytes(b"\x93NUMPY"),
        lambda folder: (folder / "about.json").write_text("{"),
        lambda folder: (folder / "about.json").write_text('{"sha256": "", "extra": {}, "stamps": {}}'),
        lambda folder: flip(folder / "about.json", 20),
    ],
    ids=["bit", "labels", "file", "cut off", "about", "empty", "sha256"],
)
def test_a_damaged_cache_is_made_anew_with_a_warning(root, cache, damage, capsys):
    first = prepared(root, cache).cached
    damage(first.folder)
    second = prepared(root, cache).cached
    assert second == first
    assert same(arrays(second), decoded(root))
    assert capsys.readouterr().err == f"WARNING: the decoded data in {first.folder} is damaged and is decoded again.\n"


def test_a_cache_is_hashed_only_if_its_files_were_touched(root, cache, monkeypatch):
    first = prepared(root, cache).cached
    monkeypatch.setattr(Mnist, "read_files", unwanted)
    os.utime(first.folder / "train" / "input.npy")  # a copy of the cache
    assert prepared(root, cache).cached == first
    monkeypatch.setattr(cache_module, "digest_of", unwanted)
    monkeypatch.setattr(cache_module, "verified", {})  # another process
    with pytest.raises(AssertionError):
        prepared(root, cache)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    later(path)


def zero(path: Path) -> None:
    labels = np.load(path, mmap_mode="r+")
    labels[:] = 0
    labels.flush()
    later(path)


def later(path: Path) -> None:
    """As if the file was changed a second later: a file system's clock may be that coarse."""
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


def test_what_killed_processes_left_is_removed_unless_one_still_writes(root, cache):
    for name in ("mnist-left", "mnist-busy"):
        (cache / f"{name}.part").mkdir(parents=True)
    with FileLock(cache / "mnist-busy.lock"):
        prepared(root, cache)
    assert not (cache / "mnist-left.part").exists()
    assert (cache / "mnist-busy.part").exists()


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home of its own, and a work folder, in which nothing may appear."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def nowhere() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize(
    ("xdg", "expected"),
    [
        (None, "home/.cache/lockstep"),
        ("", "home/.cache/lockstep"),  # the standard: empty is as good as not set
        ("xdg", "xdg/lockstep"),
        ("file", "temporary/*"),  # it cannot be written
        ("nowhere", "temporary/*"),  # there is no home, as in some containers
    ],
)
def test_the_cache_is_in_the_users_cache_folder_or_among_the_temporary_files(home, root, monkeypatch, xdg, expected):
    place = home.parent
    (place / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(place / "temporary"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg == "nowhere":
        monkeypatch.setattr(Path, "home", nowhere)
    elif xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg and str(place / xdg))
    assert cache_folder(None).match(str(place / expected))
    assert not list(Path.cwd().iterdir())
    if xdg == "file":
        found = prepared(root, None)
        assert found.cached.folder.parent == cache_folder(None)
        assert len(found.train) == 60


def test_data_that_is_changed_under_a_run_is_noticed_once_and_cheaply(root, cache, monkeypatch):
    data = prepared(root, cache)
    before = data.fingerprint
    os.utime(data.cached.folder / "train" / "input.npy")
    assert data.fingerprint == before
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "digest_of", unwanted)
        assert data.fingerprint == before  # not hashed again
    flip(data.cached.folder / "train" / "input.npy", -100)
    with pytest.raises(DataChanged, match=str(data.cached.folder)):
        _ = data.fingerprint
    shutil.rmtree(data.cached.folder)
    assert data.fingerprint == before  # what is mapped stays


@pytest.mark.parametrize("decode", ["cache", "workers"])
def test_a_full_disk_is_an_error_for_people(root, tmp_path, cache, monkeypatch, decode):
    """NumPy's error has no number, and an array on a full disk would end the process."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    photos = Folder(root=str(write_classes(tmp_path / "photos", 3)), image_size=8, cache_dir=str(cache), decode=decode)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        patch.setattr(Path, "write_text", full)
        for data in (photos, Mnist(root=str(root), cache_dir=str(cache), image_size=28)):
            with pytest.raises(UserError, match=r"data.cache_dir=.* cannot be written: .*No space left on device"):
                data.prepare()
    save = np.save

    def fail_at_the_test_part(path, array):
        np.repeat(array, 99).tofile("/dev/full") if path.parent.name == "test" else save(path, array)

    monkeypatch.setattr(np, "save", fail_at_the_test_part)
    with pytest.raises(UserError, match=r"data.cache_dir=.* requested and \d+ written.* Free some space, or set"):
        prepared(root, cache)
    assert not folders(cache)
    monkeypatch.setattr(np, "save", save)
    assert same(arrays(prepared(root, cache).cached), decoded(root))
