"""Whatever bytes a file holds, it is read as its format says or refused with a UserError that names it."""

import csv
import gzip
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pictures import write_classes

from lockstep.checkpoints.finding import checkpoint_of_report
from lockstep.data import Cifar10, Folder, Mnist, folder, published
from lockstep.errors import UserError
from lockstep.launch import sweeps
from lockstep.run.folder import RunFolder

FEW = settings(
    max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
HEADER = st.builds(lambda kind, sizes: bytes([0, 0, kind, len(sizes)]) + b"".join(n.to_bytes(4, "big") for n in sizes),
                   st.sampled_from([8, 8, 8, 9]), st.lists(st.integers(0, 4) | st.integers(0, 2**32 - 1), max_size=4))  # fmt: skip
IDX = st.builds(bytes.__add__, HEADER, st.binary(max_size=64)) | st.binary(max_size=40)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
CELLS = (
    st.sampled_from(["path", "target", "split", "a.png", "b.png", "x", "train", "test", "val", "", "\0", '"']) | TEXT
)


@FEW
@given(content=IDX)
def test_an_idx_file_of_any_bytes(tmp_path, content):
    size = 4 * content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else -1
    shape = [int.from_bytes(content[4 + i : 8 + i], "big") for i in range(0, max(0, size), 4)]
    good = len(content) >= 4 + size and shape and len(content) == 4 + size + math.prod(shape)
    for path, written in ((tmp_path / "images", content), (tmp_path / "images.gz", gzip.compress(content))):
        path.write_bytes(written)
        if good:
            assert np.array_equal(published.read_idx(path), np.frombuffer(content, np.uint8)[4 + size :].reshape(shape))
        else:
            with pytest.raises(UserError, match="images"):
                published.read_idx(path)


@FEW
@given(content=st.binary(max_size=60))
def test_an_archive_or_a_pickle_of_any_bytes(tmp_path, content):
    (tmp_path / "images.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"images\.gz"):
        published.read_idx(tmp_path / "images.gz")
    files = [tmp_path / name for name in Cifar10.md5]
    for path in files:
        path.write_bytes(content)
    with pytest.raises(UserError, match="data_batch_1"):  # a pickle with another checksum is never opened
        Cifar10.read_files(files)


@FEW
@given(rows=st.lists(st.lists(CELLS, max_size=4), max_size=5), content=st.none() | st.binary(max_size=30))
def test_a_listing_of_any_cells(tmp_path, rows, content):
    path = tmp_path / "list.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["path", "target", "split"], *rows])
    if content is not None:
        path.write_bytes(content)
    try:
        found = folder.from_csv(path)
    except UserError as e:
        assert "list.csv" in str(e)
    else:
        assert len(found.paths) == len(found.targets) == len(found.parts) > 0
        assert all(name and "\0" not in name for name in found.paths)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | TEXT,
    lambda e: st.lists(e, max_size=2) | st.dictionaries(TEXT, e, max_size=2),
)


@FEW
@given(content=st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()))
def test_a_report_of_any_bytes(tmp_path, content):
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    path = run / "report.json"
    path.write_bytes(content)
    try:
        good = isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        good = False
    if good:
        assert RunFolder(run).report() == json.loads(content) or b"NaN" in content
    else:
        for read in (lambda folder: RunFolder(folder).report(), lambda folder: sweeps.record(folder, [], failed=True)):
            with pytest.raises(UserError, match=r"report\.json"):
                read(run)
    with pytest.raises(UserError, match=r"report\.json|holds no checkpoint"):
        checkpoint_of_report(run)


def test_an_archive_that_unpacks_to_more_than_its_header_says_is_not_unpacked(tmp_path, monkeypatch):
    taken = []
    read = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, size=-1: taken.append(size) or read(self, size))
    header = bytes([0, 0, 8, 1]) + (5).to_bytes(4, "big")
    (tmp_path / "a.gz").write_bytes(gzip.compress(header + bytes(10_000_000)))
    with pytest.raises(UserError, match="more bytes than the 5 of its header"):
        published.read_idx(tmp_path / "a.gz")
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes([0, 0, 8, 1]) + b"\xff" * 4))  # 4 GB by its header
    with pytest.raises(UserError, match=r"a\.gz"):
        published.read_idx(tmp_path / "a.gz")
    assert all(0 <= size <= 16 for size in taken)


@pytest.mark.parametrize(("where", "name"), [(Path, "iterdir"), (os, "scandir"), (Path, "is_file")])
def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch, where, name):
    def refuse(path: object, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    kind = Mnist if name == "is_file" else Folder
    data = kind(root=str(write_classes(tmp_path, 2)), image_size=8, cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(where, name, refuse)
    with pytest.raises(UserError, match=r"data.root=.* cannot be read: .*Permission denied. Make it readable, or set"):
        data.prepare()


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"labels is cut off or damaged, or cannot be read \(Permission denied\)"):
        published.read_idx(tmp_path / "labels")
