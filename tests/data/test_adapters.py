"""Samples of other libraries: what is taken from torch, torchvision and Hugging Face, and what is rejected."""

import importlib.util
import os
import urllib.error
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import torchvision
from pictures import COLOURS, picture, write_classes
from PIL import Image
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset

from lockstep.data.dataset import content_of
from lockstep.data.parts import batch_of
from lockstep.errors import UserError
from lockstep.extras.adapters import HuggingFace, TorchDataset, Torchvision

PLACES = np.arange(4)


def vectors(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 5, generator=generator), torch.arange(count) % 3)


def pictures(fingerprint: str | None = None) -> Dataset:
    """PIL images of several sizes, as dicts with an extra value."""
    images, height = [picture(COLOURS["red"], i) for i in range(9)], [0.5 * i for i in range(9)]
    data = StackDataset(input=images, target=[i % 3 for i in range(9)], height=height)
    data.classes, data.fingerprint = list(COLOURS), fingerprint
    return data


def torch_data(train: Dataset, test: Dataset | None = None, **options) -> TorchDataset:
    return TorchDataset(train=train, test=test or train, **options)


# --- torch ---


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_of_a_dataset_become_bytes_of_one_size(channels):
    data = torch_data(pictures(), image_size=8, channels=channels)
    batch = batch_of(data.train, PLACES)
    assert (batch["input"].dtype, tuple(batch["input"].shape)) == (torch.uint8, (4, channels, 8, 8))
    assert (batch["target"].dtype, batch["height"].dtype) == (torch.int64, torch.float32)
    assert (data.unit, data.metadata["classes"]) == ("images", list(COLOURS))
    assert data.model_kwargs() == {"in_channels": channels, "image_size": 8}


def test_what_is_no_image_goes_to_the_network_as_it_is():
    data = torch_data(vectors(12), classes=["a", "b", "c"])
    data.prepare()
    batch = data.train[PLACES]
    assert torch.equal(batch["input"], vectors(12).tensors[0][:4])
    assert data.preprocess(batch) is batch
    described = (data.unit, data.metadata, data.model_kwargs())
    assert described == ("samples", {"classes": ["a", "b", "c"]}, {"in_features": 5})
    message = r"data.image_size=64 has no effect: `input` is float32 of shape \(5,\), not a uint8 image.*\n.*data.channels=1 has"
    with pytest.raises(UserError, match=message):
        torch_data(vectors(12), channels=1, image_size=64).prepare()


def test_classes_are_those_of_the_dataset_or_of_its_targets():
    assert torch_data(vectors(12)).metadata["classes"] == ["0", "1", "2"]
    assert torch_data(Subset(pictures(), [3, 4])).metadata["classes"] == list(COLOURS)
    named = vectors(12)
    named.targets = [0, 2, 1] * 4
    assert torch_data(named).metadata["classes"] == ["0", "1", "2"]


def test_a_fingerprint_tells_datasets_apart():
    first = torch_data(vectors(500), vectors(6)).fingerprint
    assert torch_data(vectors(500), vectors(6)).fingerprint == first
    changed = vectors(500)
    changed.tensors[0][377, 2] += 1e-6
    for other in ((changed, vectors(6)), (vectors(6), vectors(500))):
        assert torch_data(*other).fingerprint != first
    assert torch_data(pictures("1")).fingerprint != torch_data(pictures("2"), pictures("1")).fingerprint


def test_the_fingerprint_of_boxes_is_one_of_their_numbers():
    """Not of where they are in memory: another process would refuse to resume."""

    def boxed(*rows: int) -> object:
        class Boxed:
            def __len__(self) -> int:
                return 2

            def __getitems__(self, indices: list[int]) -> dict:
                return {"target": [{"boxes": torch.full((rows[i], 4), 3.0), "labels": [1]} for i in indices]}

        return Boxed()

    same, other = content_of(boxed(2, 1)), content_of(boxed(1, 2))
    assert content_of(boxed(2, 1)) == same != other


def elsewhere(image: Image.Image) -> Image.Image:
    return image.rotate(os.urandom(1)[0])


def test_random_transforms_that_cannot_be_seeded_are_noticed(tmp_path):
    write_classes(tmp_path, 4)
    for transform in (None, torchvision.transforms.RandomCrop(9), elsewhere):
        train = torchvision.datasets.ImageFolder(str(tmp_path), transform=transform)
        data = torch_data(train, image_size=8)
        data.prepare()
        assert ("that cannot be seeded" in (data.notice or "")) == (transform is elsewhere)
        assert data.fingerprint == torch_data(train, image_size=8).fingerprint


# --- torchvision ---


def named(dataset: str, root: Path, **changes) -> Torchvision:
    return Torchvision(dataset=dataset, root=str(root), cache_dir=str(root / "cache"), image_size=8, **changes)


def test_its_own_parts_are_taken_and_without_a_test_part_its_val_is_the_test(tmp_path):
    for part, count in (("train", 4), ("valid", 2), ("test", 3)):
        write_classes(tmp_path / "country211" / part, count)
    data = named("Country211", tmp_path)
    assert [len(part) for part in (data.train, data.val, data.test)] == [12, 6, 9]
    assert data.metadata["classes"] == list(COLOURS)
    for path in (f"{part}/{wnid}" for part in ("train", "val") for wnid in ("n01440764", "n02102040")):
        (tmp_path / "imagenette2" / path).mkdir(parents=True)
        for number in range(4 if path.startswith("train") else 2):
            picture(COLOURS["red"], number).save(tmp_path / "imagenette2" / path / f"{number}.JPEG")
    data = named("Imagenette", tmp_path)
    assert [len(data.train), data.val, len(data.test)] == [8, None, 4]
    assert "Imagenette has no test split: its validation split is the test set" in data.notice
    assert data.metadata["classes"][0] == "tench"


@pytest.mark.parametrize(("dataset", "changes", "message"), [
    ("FashionMNIST", {"source": "disk"}, r"has no files, not torchvision's FashionMNIST \(.*\). Set data.root=<folder>, or data.source=download"),
    ("Country211", {}, r"Country211 is not in data.root=.* and could not be downloaded \(.*no route.*\). Set data.root=<folder"),
    ("EuroSAT", {}, r"torchvision.datasets.EuroSAT has no test split. Use data=folder"),
])  # fmt: skip
def test_an_error_about_missing_data_says_what_to_set(tmp_path, monkeypatch, dataset, changes, message):
    def unreachable(*_, **__):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(torchvision.datasets.utils, "_urlretrieve", unreachable)
    monkeypatch.setattr(torchvision.datasets.utils, "_get_redirect_url", unreachable)
    with pytest.raises(UserError, match=message):
        len(named(dataset, tmp_path, **changes).train)


# --- Hugging Face ---

COLUMNS = {"x": np.arange(60, dtype=np.float32).reshape(20, 3), "kind": ["cat", "dog"] * 10, "price": np.arange(20) / 4}


def held(where: Path, columns: dict, parts: dict | None = None, **keys) -> HuggingFace:
    """A folder of `save_to_disk`: one table, or several by their names."""
    table = datasets.Dataset.from_dict(columns)
    tables = {name: datasets.Dataset.from_dict(more) for name, more in (parts or {}).items()}
    (datasets.DatasetDict(train=table, **tables) if tables else table).save_to_disk(where / "saved")
    return HuggingFace(**{"root": str(where / "saved"), "cache_dir": str(where / "cache"), **keys})


def test_columns_of_numbers_are_arrays(tmp_path):
    tokens = np.arange(80).reshape(20, 4)
    batch = held(
        tmp_path / "tokens", {"ids": tokens, "next": tokens + 1}, input="ids", target="next"
    ).train.__getitems__(PLACES)
    assert batch["input"].dtype == batch["target"].dtype == np.int64
    assert np.array_equal(batch["input"] + 1, batch["target"])
    data = held(tmp_path, COLUMNS, input="x", target="price")
    batch = data.train.__getitems__(PLACES)
    assert (batch["input"].dtype, batch["input"].shape, batch["target"].shape) == (np.float32, (4, 3), (4, 1))
    assert np.allclose(batch["target"][:, 0] * 12, batch["input"][:, 0])  # of the same rows
    assert (data.metadata, data.model_kwargs(), data.unit) == ({"targets": ["price"]}, {"in_features": 3}, "samples")


def test_texts_are_classes_a_part_of_each_is_held_out_and_splits_are_taken(tmp_path):
    data = held(tmp_path, COLUMNS, input="x", target="kind", test_fraction=0.3)
    assert data.metadata["classes"] == ["cat", "dog"]
    assert np.bincount(data.test.__getitems__(np.arange(6))["target"]).tolist() == [3, 3]
    rows = [part.places.tolist() for part in (data.train, data.val, data.test)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(20))
    data = HuggingFace(root=str(tmp_path / "saved"), input="x", target="kind", test_fraction=0.3, folds=2)
    assert (len(data.train), data.val, len(data.test)) == (14, None, 6)
    four = {name: values[:4] for name, values in COLUMNS.items()}
    data = held(tmp_path / "split", COLUMNS, {"validation": four}, input="x", target="kind")
    assert [len(part) for part in (data.train, data.val, data.test)] == [18, 4, 2]
    datasets.DatasetDict(everything=datasets.Dataset.from_dict(COLUMNS)).save_to_disk(tmp_path / "no train")
    with pytest.raises(UserError, match="has no split `train`; it has everything"):
        HuggingFace(root=str(tmp_path / "no train")).prepare()


@pytest.mark.parametrize(("keys", "parts", "message"), [
    ({"input": "y", "target": "kind"}, {}, r"data.input=y: no such column; .* has x, kind, price"),
    ({"input": "x", "target": "prize"}, {}, r"no such column \(did you mean price\?\)"),
    ({"root": "."}, {}, "is not a folder written by `save_to_disk`"),
    ({"root": "nowhere"}, {}, "is not a folder written"),
    ({"input": "x", "target": "kind"}, {"test": {"x": [[0.0] * 3], "kind": ["cow"], "price": [0.0]}},
     r"kind=cow in row 0 of the test part is not one of the 2 classes of train"),
    ({"input": "x", "target": "even"}, {"test": {"x": [[0.0] * 3], "even": [-1]}}, r"even=-1 in row 0 of the test part is not one of the 2 classes"),
    ({"input": "x", "target": "kind"}, {"val": COLUMNS, "validation": COLUMNS}, "has val and validation, which both mean the val part"),
])  # fmt: skip
def test_folders_columns_and_parts_that_do_not_fit_are_rejected(tmp_path, keys, parts, message):
    columns = {name: [0, 1] * 10 if name == "even" else COLUMNS[name] for name in parts.get("test", COLUMNS)}
    with pytest.raises(UserError, match=message):
        held(tmp_path, columns, parts, **keys).prepare()


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    assert list(HuggingFace.problems({})) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "Run uv sync --extra huggingface, or pip install datasets" in next(iter(HuggingFace.problems({})))
