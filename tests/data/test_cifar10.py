"""CIFAR-10 as published: read exactly, and no file is unpickled that was changed."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from conftest import write_cifar10

from lockstep.data import Cifar10
from lockstep.errors import UserError


class Touch:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_cifar10_is_read_in_its_order(tmp_path, monkeypatch):
    monkeypatch.setattr(Cifar10, "md5", write_cifar10(tmp_path, 6))
    parts = Cifar10.read_files(Cifar10.find(tmp_path))
    batches = [pickle.loads((tmp_path / Cifar10.folders[0] / name).read_bytes()) for name in Cifar10.md5]
    assert parts["train/input"].shape == (30, 3, 32, 32)
    assert parts["test/input"].shape == (6, 3, 32, 32)
    assert parts["train/input"].tobytes() == b"".join(batch[b"data"].tobytes() for batch in batches[:5])
    assert parts["train/target"].tolist() == [label for batch in batches[:5] for label in batch[b"labels"]]
    assert parts["test/input"].tobytes() == batches[5][b"data"].tobytes()
    assert parts["test/target"].tolist() == batches[5][b"labels"]
    assert parts["train/input"].dtype == parts["train/target"].dtype == np.uint8


@pytest.mark.parametrize("below", [Cifar10.folders[0], "."])
def test_cifar10_is_found_in_its_folder_and_in_the_folder_above(tmp_path, below):
    write_cifar10(tmp_path, 1)
    folder = tmp_path / Cifar10.folders[0]
    root = tmp_path if below != "." else folder
    assert Cifar10.find(root) == [folder / name for name in Cifar10.md5]
    (folder / "test_batch").unlink()
    assert Cifar10.find(root) is None


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch"])
def test_a_changed_cifar10_file_is_refused_before_it_is_unpickled(tmp_path, monkeypatch, name):
    monkeypatch.setattr(Cifar10, "md5", write_cifar10(tmp_path, 1))
    path, marker = tmp_path / Cifar10.folders[0] / name, tmp_path / "marker"
    path.write_bytes(pickle.dumps(Touch(marker)))
    with pytest.raises(UserError, match=rf"{name} .*data\.source=download"):
        Cifar10.read_files(Cifar10.find(tmp_path))
    assert not marker.exists()
    pickle.loads(path.read_bytes())
    assert marker.exists()  # it would have run
    monkeypatch.undo()  # all made-up files have other checksums than the published ones
    with pytest.raises(UserError) as error:
        Cifar10.read_files(Cifar10.find(tmp_path))
    assert all(name in str(error.value) for name in Cifar10.md5)
