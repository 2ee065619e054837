"""An index operation in memory gives the batches that a DataLoader with workers gives; no process copies the images."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lockstep.data import loaders
from lockstep.data.datamodule import DataModule
from lockstep.data.dataset import Arrays, content_of, samples_of
from lockstep.data.loaders import FromWorkers, InMemory, fetch
from lockstep.data.sampler import PaddedEvalSampler, Split, TrainBatches
from lockstep.errors import UserError

SPLIT = Split(103, 10, 90)
DEVICES = [None, torch.device("cpu"), *[torch.device("cuda")] * torch.cuda.is_available()]


@pytest.fixture
def arrays() -> Arrays:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (103, 3, 4, 5), dtype=np.uint8)
    return Arrays(input=images, target=random.integers(0, 10, 103))


class Pairs(Dataset):
    """The same samples as a torch Dataset, which gives them one at a time."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays.arrays

    def __len__(self) -> int:
        return len(self.arrays["target"])

    def __getitem__(self, place: int):
        return torch.from_numpy(self.arrays["input"][place]), int(self.arrays["target"][place])


class Dicts(Pairs):
    def __getitem__(self, place: int):
        return dict(zip(("input", "target"), super().__getitem__(place), strict=True))


class MapStyle:
    """An object of one's own, which gives several at a time and is never asked for a filler."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays.arrays

    def __getitem__(self, indices):
        assert (indices >= 0).all()
        return {name: array[indices] for name, array in self.arrays.items()}


def samplers() -> list:
    evaluation = Split(103, 0, 103, shuffled=False)
    return [
        TrainBatches(SPLIT, batch=20, seed=3, rank=1, world=2),
        PaddedEvalSampler(evaluation, batch=40, rank=1, world=2),  # the last batch has places without a sample
    ]


def assert_same(batches: list, expected: list) -> None:
    for batch, other in zip(batches, expected, strict=True):
        assert batch.keys() == other.keys() == {"input", "target", "index", "count"}
        count = batch["count"]
        assert count == other["count"] == int((batch["index"] >= 0).sum())
        assert torch.equal(batch["index"], other["index"])
        assert (batch["index"][:count] >= 0).all()  # the real ones come first
        for name in ("input", "target"):
            assert torch.equal(batch[name][:count], other[name][:count])
            assert len(batch[name]) == len(batch["index"])


@pytest.mark.parametrize("at_once", [0, 10 * 60 * 2, 2**19])  # a batch, three, all
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", [0, 1])
def test_memory_and_workers_give_the_same_batches(arrays, which, device, at_once, monkeypatch):
    monkeypatch.setattr(loaders, "AT_ONCE", at_once)
    there = InMemory(arrays, device)
    assert (there.on_device == {}) == (device is None)  # the arrays stay where they are: no process copies them
    memory = [
        {name: value.cpu() if torch.is_tensor(value) else value for name, value in batch.items()}
        for batch in there.batches(samplers()[which])
    ]
    assert len(memory) == len(samplers()[which]) > 1
    assert np.array_equal(memory[0]["input"], arrays.arrays["input"][memory[0]["index"]])
    assert (memory[-1]["count"] < len(memory[-1]["index"])) == (which == 1)
    assert_same(memory, list(FromWorkers(arrays, samplers()[which], num_workers=0).batches()))


@pytest.mark.parametrize("form", [Pairs, Dicts, MapStyle])
def test_samples_give_the_same_batches_in_whatever_form_they_come(arrays, form):
    for sampler in samplers():
        own = FromWorkers(samples_of(form(arrays)), sampler, num_workers=0)
        assert_same(list(InMemory(arrays, None).batches(sampler)), list(own.batches()))


def test_a_fingerprint_tells_samples_apart_in_whatever_form_they_come(arrays):
    changed = Arrays(**{name: array.copy() for name, array in arrays.arrays.items()})
    changed.arrays["target"][0] += 1
    for form in (lambda given: given, Pairs, Dicts):
        assert content_of(form(arrays)) == content_of(form(arrays))
        assert content_of(form(arrays)) != content_of(form(changed))


def test_spawned_workers_map_the_file_again(arrays, tmp_path):
    for name, array in arrays.arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    mapped = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in arrays.arrays}
    content = pickle.dumps(Arrays(**mapped))
    assert len(content) < 1000 < arrays.nbytes
    again = pickle.loads(content)
    assert isinstance(again.arrays["input"], np.memmap)
    part = pickle.loads(pickle.dumps(Arrays(input=mapped["input"][7:])))
    assert np.array_equal(part.arrays["input"], arrays.arrays["input"][7:])
    for name, found in again[np.arange(103)].items():
        assert np.array_equal(found, arrays.arrays[name])


def test_arrays_of_different_lengths_are_refused(arrays):
    with pytest.raises(ValueError, match=r"one length.*'input': 103, 'target': 102"):
        Arrays(input=arrays.arrays["input"], target=arrays.arrays["target"][1:])


@pytest.mark.parametrize(
    ("device", "asked", "size", "expected"),
    [
        ("cuda", "auto", 100, "cuda"),  # a tenth of what is free
        ("cuda", "auto", 101, None),
        ("cuda", True, 900, "cuda"),
        ("cuda", False, 1, None),
        ("cpu", "auto", 1, None),
    ],
)
def test_images_live_on_the_gpu_where_they_are_asked_to_or_take_little_of_it(
    device, asked, size, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 4000))
    data = SimpleNamespace(device=torch.device(device), on_device=asked)
    images = Arrays(input=np.zeros((size, 1), np.uint8))
    assert DataModule.home(data, images) == (expected and torch.device(expected))


@pytest.mark.parametrize(
    ("value", "sizes"), [([[1.0], [2.0, 3.0]], "1, 2"), ([np.ones((2, 4)), np.ones((3, 4))], r"\(2, 4\), \(3, 4\)")]
)
def test_numbers_of_several_shapes_are_refused_by_name(value, sizes):
    class Ragged:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, indices: np.ndarray) -> dict:
            return {"input": np.ones((len(indices), 3)), "tags": [["a"], ["b", "c"]], "tokens": value}

    with pytest.raises(UserError, match=f"`tokens` as numbers of several shapes: the first samples have {sizes}. Pad"):
        fetch(Ragged(), np.arange(2))
    value[:] = [torch.ones(1), torch.ones(2)]
    batch = fetch(Ragged(), np.arange(2))
    assert batch["tokens"] is value
    assert batch["tags"] == [["a"], ["b", "c"]]
