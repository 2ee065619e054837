"""Whatever bytes a file holds, it is read as its format says or refused with a UserError that names it."""

import csv
import gzip
import os
from pathlib import Path

import pytest
from conftest import write_idx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pictures import write_classes

from lockstep.errors import UserError
from lockstep.kit import Folder, listing, published
from project.data import Mnist

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
def test_an_idx_file_of_any_bytes_is_read_as_they_say_or_refused(tmp_path, content):
    (tmp_path / "cut.gz").write_bytes(gzip.compress(content)[:-3])
    with pytest.raises(UserError, match=r"cut\.gz is truncated, damaged or unreadable"):
        published.read_idx(tmp_path / "cut.gz")
    for path, written in ((tmp_path / "images", content), (tmp_path / "images.gz", gzip.compress(content))):
        path.write_bytes(written)
        try:
            found = published.read_idx(path)
        except UserError as e:
            assert "images" in str(e)
        else:
            write_idx(tmp_path / "again", found)
            assert (tmp_path / "again").read_bytes() == content


@FEW
@given(rows=st.lists(st.lists(CELLS, max_size=4), max_size=5), content=st.none() | st.binary(max_size=30))
def test_a_listing_of_any_cells(tmp_path, rows, content):
    path = tmp_path / "list.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["path", "target", "split"], *rows])
    if content is not None:
        path.write_bytes(content)
    try:
        found = listing.from_csv(path)
    except UserError as e:
        assert "list.csv" in str(e)
    else:
        assert len(found.paths) == len(found.targets) == len(found.parts) > 0
        assert all(name and "\0" not in name for name in found.paths)


@pytest.mark.parametrize(("where", "name"), [(Path, "iterdir"), (os, "scandir"), (Path, "is_file")])
def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch, where, name):
    def refuse(path: object, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    kind = Mnist if name == "is_file" else Folder
    data = kind(root=str(write_classes(tmp_path, 2)), image_size=8, cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(where, name, refuse)
    with pytest.raises(UserError, match=r"data.root=.* cannot be read: .*Permission denied. Make it readable, or set"):
        data.prepare()
