"""Where data comes from, and its cache: made once, by one process, whole; no network."""

import gzip
import multiprocessing
import os
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import write_cifar10, write_idx, write_mnist
from lockstep.data.prepare import FORMATS, NAMES, Prepared, default_cache, prepare, val_count
from omegaconf import DictConfig, OmegaConf

from lockstep import CONFIGS
from lockstep.data import files
from lockstep.errors import UserError

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    for name in FORMATS:
        set_format(monkeypatch, name, fetch=unreachable)


def unreachable(_: Path) -> None:
    raise ConnectionError("http://mirror/: no route to host")


def unwanted(_: object) -> files.Arrays:
    raise AssertionError("the files were read again")


def set_format(monkeypatch: pytest.MonkeyPatch, name: str, **changes) -> None:
    monkeypatch.setitem(FORMATS, name, replace(FORMATS[name], **changes))


def config(root: Path, cache: Path, name: str = "mnist", **changes) -> DictConfig:
    """The data node as it is shipped, with the test's folders."""
    shipped = OmegaConf.load(CONFIGS / "data" / f"{name}.yaml")
    return OmegaConf.merge(shipped, {"root": str(root), "cache_dir": str(cache), "batch_size": 8, **changes})


def raw(root: Path, name: str) -> Path:
    return root / "MNIST" / "raw" / name


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def assert_holds(prepared: Prepared, arrays: files.Arrays) -> None:
    for name in NAMES:
        assert np.array_equal(prepared.array(name), getattr(arrays, name)), name
    assert (prepared.train, prepared.test) == (len(arrays.train_labels), len(arrays.test_labels))


@pytest.fixture
def root(tmp_path) -> Path:
    return write_mnist(tmp_path / "data", 60, 20)


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


# --- sources ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["auto", "disk"])
def test_files_on_disk_are_decoded(root, cache, source):
    prepared = prepare(config(root, cache, source=source))
    assert prepared.source == "disk"
    assert_holds(prepared, files.read_mnist(files.mnist_files(root)))


@pytest.mark.parametrize("source", ["auto", "disk"])
def test_cifar10_on_disk_is_decoded(tmp_path, cache, monkeypatch, source):
    monkeypatch.setattr(files, "CIFAR10_MD5", write_cifar10(tmp_path / "data", 4))
    prepared = prepare(config(tmp_path / "data", cache, "cifar10", source=source))
    assert prepared.source == "disk"
    assert_holds(prepared, files.read_cifar10(files.cifar10_files(tmp_path / "data")))


@pytest.mark.parametrize("source", ["auto", "download"])
def test_files_that_are_not_there_are_fetched(tmp_path, cache, monkeypatch, source):
    set_format(monkeypatch, "mnist", fetch=lambda root: write_mnist(root, 60, 20))
    prepared = prepare(config(tmp_path / "data", cache, source=source))
    assert prepared.source == "download"
    assert_holds(prepared, files.read_mnist(files.mnist_files(tmp_path / "data")))


@pytest.mark.parametrize("damaged", ["train-images-idx3-ubyte.gz", "train-images-idx3-ubyte"])
def test_a_download_puts_damaged_files_right(root, cache, monkeypatch, damaged):
    expected = files.read_mnist(files.mnist_files(root))
    content = raw(root, "train-images-idx3-ubyte.gz").read_bytes()
    raw(root, "train-images-idx3-ubyte.gz").unlink()
    raw(root, damaged).write_bytes(content[:100])
    with pytest.raises(UserError, match=r"data\.source=download"):  # what the message says to type helps:
        prepare(config(root, cache))
    set_format(monkeypatch, "mnist", fetch=lambda root: write_mnist(root, 60, 20))
    assert_holds(prepare(config(root, cache, source="download")), expected)


def test_mnist_comes_from_its_package_without_files_and_network(tmp_path, cache):
    prepared = prepare(config(tmp_path / "missing", cache))
    assert (prepared.source, prepared.train, prepared.test) == ("embedded", 4000, 1000)
    assert_holds(prepared, files.read_embedded(files.embedded_file()))


def test_the_embedded_images_can_be_chosen_beside_files(root, cache):
    prepared = prepare(config(root, cache, source="embedded"))
    assert (prepared.source, prepared.train, prepared.test) == ("embedded", 4000, 1000)


# --- what is wrong is said -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_missing_folder_and_what_it_should_hold_are_named(tmp_path, cache, name):
    with pytest.raises(UserError, match=r"does not exist.*Type data\.root=<folder>") as error:
        prepare(config(tmp_path / "missing", cache, name, source="disk"))
    assert f"data.root={tmp_path / 'missing'}" in str(error.value)
    assert FORMATS[name].needs in str(error.value)


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_without_the_files_is_named(tmp_path, cache, name):
    with pytest.raises(UserError, match=r"has not got.*Type data\.root=<folder>") as error:
        prepare(config(tmp_path, cache, name, source="disk"))
    assert f"data.root={tmp_path} " in str(error.value)


@pytest.mark.parametrize(("name", "source"), [("mnist", "download"), ("cifar10", "download"), ("cifar10", "auto")])
def test_without_network_another_folder_is_asked_for(tmp_path, cache, name, source):
    with pytest.raises(UserError, match=r"Type data\.root=<folder>") as error:
        prepare(config(tmp_path, cache, name, source=source))
    assert f"data.root={tmp_path} " in str(error.value)
    assert "no route to host" in str(error.value)


@pytest.mark.parametrize(("changes", "possible"), [({}, 54), ({"limit_train": 20}, 20), ({"val_fraction": 0.5}, 30)])
def test_a_batch_larger_than_the_training_set_is_refused(root, cache, changes, possible):
    with pytest.raises(UserError, match=rf"data\.batch_size=55 .*Type data\.batch_size={possible} or less"):
        prepare(config(root, cache, batch_size=55, **changes))
    assert prepare(config(root, cache, batch_size=possible, **changes)).train == 60


@pytest.mark.parametrize(("train", "fraction", "expected"), [(60_000, 0.1, 6000), (640, 0.1, 64), (3, 0.01, 1)])
def test_at_least_one_image_is_kept_for_validation(train, fraction, expected):
    assert val_count(train, fraction) == expected


# --- the cache -------------------------------------------------------------------------------------------------------


def test_the_arrays_are_mapped_and_cannot_be_changed(root, cache):
    prepared = prepare(config(root, cache))
    for name in NAMES:
        array = prepared.array(name)
        assert isinstance(array, np.memmap)
        assert array.dtype == np.uint8
        assert not array.flags.writeable


@pytest.mark.parametrize("source", ["disk", "embedded"])
def test_files_are_read_once(root, cache, monkeypatch, source):
    first = prepare(config(root, cache, source=source))
    set_format(monkeypatch, "mnist", read=unwanted)
    monkeypatch.setattr(files, "read_embedded", unwanted)
    assert prepare(config(root, cache, source=source)) == first
    assert folders(cache) == [first.folder]


def test_fetched_files_are_read_once_wherever_they_came_from(tmp_path, cache, monkeypatch):
    set_format(monkeypatch, "mnist", fetch=lambda root: write_mnist(root, 60, 20))
    fetched = prepare(config(tmp_path / "data", cache))
    set_format(monkeypatch, "mnist", read=unwanted)
    found = prepare(config(tmp_path / "data", cache))
    assert (fetched.source, found.source) == ("download", "disk")
    assert found == replace(fetched, source="disk")


def test_a_file_with_other_content_makes_a_new_entry(root, cache):
    before = prepare(config(root, cache))
    write_idx(raw(root, "t10k-labels-idx1-ubyte.gz"), np.arange(20, dtype=np.uint8) % 10)
    after = prepare(config(root, cache))
    assert after.folder != before.folder
    assert after.sha256 != before.sha256
    assert after.array("test_labels").tolist() == [*range(10)] * 2


@pytest.mark.parametrize("change", ["time", "size"])
def test_a_file_written_anew_makes_a_new_entry_of_the_same_data(root, cache, change):
    before = prepare(config(root, cache))
    path = raw(root, "train-images-idx3-ubyte.gz")
    stat = path.stat()
    if change == "size":
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), 0))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 2_000_000_000 * (change == "time")))
    after = prepare(config(root, cache))
    assert after.folder != before.folder
    assert after.sha256 == before.sha256


def test_the_checksum_tells_data_apart_not_files(root, tmp_path, cache):
    compressed = prepare(config(root, cache))
    plain = shutil.copytree(root, tmp_path / "plain")
    for path in list((plain / "MNIST" / "raw").iterdir()):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert prepare(config(plain, cache)).sha256 == compressed.sha256
    other = write_mnist(tmp_path / "other", 60, 21)
    assert prepare(config(other, cache)).sha256 != compressed.sha256


def test_a_damaged_file_leaves_nothing_in_the_cache(root, cache):
    path = raw(root, "t10k-images-idx3-ubyte.gz")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(UserError, match=re.escape(str(path))):
        prepare(config(root, cache))
    assert not folders(cache)
    path.write_bytes(whole)
    assert prepare(config(root, cache)).train == 60


def test_a_writer_that_fails_leaves_no_folder(root, cache, monkeypatch):
    save, saved = np.save, []

    def fail_at_the_third(path, array):
        saved.append(path)
        if len(saved) == 3:
            raise OSError("No space left on device")
        save(path, array)

    monkeypatch.setattr(np, "save", fail_at_the_third)
    with pytest.raises(OSError, match="No space left"):
        prepare(config(root, cache))
    assert not folders(cache)
    monkeypatch.setattr(np, "save", save)
    assert_holds(prepare(config(root, cache)), files.read_mnist(files.mnist_files(root)))


def die_while_writing(data: DictConfig) -> None:
    save = np.save
    np.save = lambda path, array: os._exit(9) if path.stem == "test_images" else save(path, array)
    prepare(data)


def test_a_writer_that_is_killed_leaves_no_half_entry(root, cache):
    process = SPAWN.Process(target=die_while_writing, args=(config(root, cache),))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    assert not [path for path in folders(cache) if path.name.startswith("mnist-")]
    assert_holds(prepare(config(root, cache)), files.read_mnist(files.mnist_files(root)))


def prepare_at_once(data: DictConfig, barrier, results) -> None:
    barrier.wait(60)
    try:
        prepared = prepare(data)
        results.put((prepared, {name: np.array(prepared.array(name)) for name in NAMES}))
    except Exception as e:
        results.put(e)


def test_processes_that_prepare_at_once_get_the_same_arrays_of_one_folder(root, cache):
    barrier, results = SPAWN.Barrier(4), SPAWN.Queue()
    processes = [SPAWN.Process(target=prepare_at_once, args=(config(root, cache), barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    got = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert not [error for error in got if isinstance(error, Exception)]
    expected = files.read_mnist(files.mnist_files(root))
    assert folders(cache) == [got[0][0].folder]
    for prepared, arrays in got:
        assert prepared == got[0][0]
        assert all(np.array_equal(arrays[name], getattr(expected, name)) for name in NAMES)


# --- where the cache is ----------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home of its own, and a work folder, in which nothing may appear."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


@pytest.mark.parametrize("xdg", [None, ""])
def test_the_cache_is_in_the_home_where_nothing_else_is_said(home, monkeypatch, xdg):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)  # the standard: empty is as good as not set
    assert default_cache() == home / ".cache" / "lockstep"
    assert not list(Path.cwd().iterdir())


def test_the_cache_is_in_the_users_cache_folder(home, tmp_path, monkeypatch, root):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    prepared = prepare(config(root, "", cache_dir=None))
    assert prepared.folder.parent == tmp_path / "xdg" / "lockstep"


def test_a_home_that_cannot_be_written_is_no_obstacle(home, tmp_path, monkeypatch, root):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    prepared = prepare(config(root, "", cache_dir=None))
    assert prepared.folder.parent.parent == tmp_path / "temporary"
    assert prepared.train == 60
