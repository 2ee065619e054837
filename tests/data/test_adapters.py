"""Samples of other libraries: what is taken from torch, torchvision and Hugging Face, and what is rejected."""

import os
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
import torch
import torchvision
from pictures import COLOURS, picture, write_classes
from torch.utils.data import StackDataset, Subset, TensorDataset

from lockstep import UserError
from lockstep.data.parts import batch_of
from lockstep.extras.adapters import HuggingFace, TorchDataset, Torchvision
from lockstep.kit.datamodule import DataModule


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_of_a_dataset_become_bytes_of_one_size(channels):
    images = [picture(COLOURS["red"], i) for i in range(9)]  # of several sizes
    whole = StackDataset(input=images, target=[0, 1, 2] * 3, height=[0.5] * 9)
    whole.classes = [*COLOURS]
    data = TorchDataset(train=Subset(whole, range(9)), test=whole, image_size=8, channels=channels)
    batch = batch_of(data.train, range(4))
    assert (batch["input"].dtype, tuple(batch["input"].shape)) == (torch.uint8, (4, channels, 8, 8))
    assert (batch["target"].dtype, batch["height"].dtype) == (torch.int64, torch.float32)
    assert (data.unit, data.metadata["classes"]) == ("images", [*COLOURS])
    assert data.model_kwargs() == {"in_channels": channels, "image_size": 8}


def test_what_is_no_image_goes_to_the_network_as_it_is():
    vectors = TensorDataset(torch.randn(12, 5), torch.arange(12) % 3)
    data = TorchDataset(train=vectors, test=vectors)
    data.prepare()
    batch = batch_of(data.train, range(4))
    assert torch.equal(batch["input"], vectors.tensors[0][:4])
    assert data.preprocess(batch) is batch
    described = (data.unit, data.metadata, data.model_kwargs())
    assert described == ("samples", {"classes": ["0", "1", "2"]}, {"in_features": 5})
    with pytest.raises(UserError, match=r"image_size=64 has no effect: .* not a uint8 image.*\n.*data.channels=1 has"):
        TorchDataset(train=vectors, test=vectors, channels=1, image_size=64).prepare()


def test_fingerprints_tell_data_apart_and_contain_no_addresses():
    """Another process would refuse to resume."""
    first, again, changed, tagged = (TensorDataset(torch.zeros(500, 5), torch.arange(500)) for _ in range(4))
    changed.tensors[0][377, 2] += 1e-6
    tagged.fingerprint = "1"
    boxes, same = ([{"input": 0.0, "target": [{"boxes": torch.ones(n, 4)}]} for n in (1, 2)] for _ in range(2))
    parts = [first, again, changed, tagged, boxes, same, boxes[::-1]]
    prints = [TorchDataset(train=first, test=part).fingerprint for part in parts]
    assert prints[0] == prints[1] and prints[4] == prints[5] and len({*prints}) == 5


def test_random_transforms_that_cannot_be_seeded_are_noticed(tmp_path):
    write_classes(tmp_path, 4)
    noticed = {torchvision.transforms.RandomCrop(9): False, lambda image: image.rotate(os.urandom(1)[0]): True}
    for transform, is_noticed in noticed.items():
        train = torchvision.datasets.ImageFolder(str(tmp_path), transform=transform)
        data = TorchDataset(train=train, test=train, image_size=8)
        data.prepare()
        assert ("that cannot be seeded" in (data.notice or "")) == is_noticed
        assert data.fingerprint == TorchDataset(train=train, test=train, image_size=8).fingerprint


def test_official_splits_are_used_and_val_stands_in_for_test(tmp_path):
    for part, count in (("train", 4), ("valid", 2), ("test", 3)):
        write_classes(tmp_path / "country211" / part, count)
    data = Torchvision(dataset="Country211", root=tmp_path)
    assert [len(part) for part in (data.train, data.val, data.test)] == [12, 6, 9]
    for part in ("train", "val"):
        folder = tmp_path / "imagenette2" / part / "n01440764"
        folder.mkdir(parents=True)
        picture(COLOURS["red"], 0).save(folder / "0.JPEG")
    data = Torchvision(dataset="Imagenette", root=tmp_path)
    assert (len(data.train), data.val, len(data.test), data.metadata["classes"]) == (1, None, 1, ["tench"])
    assert "Imagenette has no test split: its validation split is the test set" in data.notice


@pytest.mark.parametrize(("dataset", "source", "message"), [
    ("FashionMNIST", "disk", r"has no files: torchvision's FashionMNIST is not there and was not downloaded \(.*\). Set data.root=<folder .*, data.source=download"),
    ("Country211", "auto", r"data.root=.*: torchvision's Country211 is not there and was not downloaded \(.*no route.*\). Set data.root=<folder"),
    ("EuroSAT", "auto", r"torchvision.datasets.EuroSAT has no test split. Use data=folder"),
])  # fmt: skip
def test_an_error_about_missing_data_says_what_to_set(tmp_path, monkeypatch, dataset, source, message):
    monkeypatch.setattr(torchvision.datasets.utils, "_get_redirect_url", Mock(side_effect=OSError("no route to host")))
    with pytest.raises(UserError, match=message):
        len(Torchvision(dataset=dataset, root=tmp_path, source=source).train)


def table(**columns):
    vectors, kinds = np.arange(60, dtype=np.float32).reshape(20, 3), ["cat", "dog"] * 10
    return datasets.Dataset.from_dict({"x": vectors, "kind": kinds, "id": np.arange(20) * 1000, **columns})


def saved(folder, tables, **options):
    """A folder of `save_to_disk`: one table, or several by their names."""
    (datasets.DatasetDict(tables) if len(tables) > 1 else tables["train"]).save_to_disk(folder)
    return HuggingFace(**{"root": folder, "input": "x", "target": "kind", **options})


def test_columns_of_numbers_are_arrays(tmp_path):
    tokens = np.arange(80).reshape(20, 4)
    batch = saved(tmp_path / "tokens", {"train": table(x=tokens, kind=tokens + 1)}).train.__getitems__(np.arange(4))
    assert batch["input"].dtype == batch["target"].dtype == np.int64
    assert np.array_equal(batch["input"] + 1, batch["target"])
    data = saved(tmp_path / "ids", {"train": table(id=[*range(0, 19_000, 1000), None])}, target="id")
    batch = data.train.__getitems__([5, 0, 3])
    assert batch["input"].dtype == batch["target"].dtype == np.float32
    assert np.array_equal(batch["target"] * 3, batch["input"][:, :1] * 1000)  # of the same rows
    assert np.isnan(data.targets("train")).sum() == 1  # a task rejects it: test_labels.py
    assert (data.metadata, data.model_kwargs(), data.unit) == ({"targets": ["id"]}, {"in_features": 3}, "samples")


def test_missing_splits_are_taken_from_train(tmp_path):
    data = saved(tmp_path / "one", {"train": table()}, test_fraction=0.3)
    assert np.bincount(data.test.__getitems__(np.arange(6))["target"]).tolist() == [3, 3]
    rows = np.concatenate([part.places for part in (data.train, data.val, data.test)])
    assert sorted(rows.tolist()) == [*range(20)]
    data = saved(tmp_path / "folds", {"train": table()}, test_fraction=0.3, folds=2)
    assert (len(data.train), data.val, len(data.test)) == (14, None, 6)
    data = saved(tmp_path / "two", {"train": table(), "validation": table()})
    assert [len(part) for part in (data.train, data.val, data.test)] == [18, 20, 2]


def test_classes_of_splits_are_matched_by_name(tmp_path):
    train = table().cast_column("kind", datasets.ClassLabel(names=["cat", "dog"]))
    val = table().cast_column("kind", datasets.ClassLabel(names=["dog", "cat"]))
    data = saved(tmp_path, {"train": train, "val": val, "test": table()})
    module = DataModule(data, batch_size=2, eval_batch_size=2)
    targets = [module.raw(part, np.arange(4))["target"].tolist() for part in ("train", "val", "test")]
    assert targets == [[0, 1, 0, 1]] * 3
    assert module.metadata == {"classes": ["cat", "dog"], "class_counts": [10, 10]}


@pytest.mark.parametrize(("tables", "options", "message"), [
    ({"train": table()}, {"target": "idd"}, r"Column name .*idd.* not in the dataset. Current columns .*'x', 'kind', 'id'.* Set data.input and data.target"),
    ({"train": table()}, {"root": "nowhere"}, "nowhere does not exist: it is not a folder written by `save_to_disk`"),
    ({"all": table(), "test": table()}, {}, "has no split `train`; it has all, test"),
    ({"train": table(x=[[0.0], None] * 10)}, {}, "x has no value in row 1 of the train part. Remove"),
    ({"train": table(kind=["b", None, "", "a"] * 5)}, {}, "kind=None in row 1 of the train part is not one of the 2 classes"),
    ({"train": table(kind=[0, 1] * 10), "test": table(kind=[-1] * 20)}, {}, "kind=-1 in row 0 of the test part is not one of the 2"),
])  # fmt: skip
def test_tables_that_do_not_fit_are_rejected(tmp_path, tables, options, message):
    with pytest.raises(UserError, match=message):
        saved(tmp_path, tables, **options).prepare()


def test_a_missing_package_is_named_with_its_install_command(monkeypatch):
    assert [*HuggingFace.problems({})] == []
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "Run uv sync --extra huggingface, or pip install datasets" in next(iter(HuggingFace.problems({})))
