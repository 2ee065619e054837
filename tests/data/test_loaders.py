"""Batches on their way to the network: the same from memory and from workers, in any form of samples, with what is no tensor."""

import errno
import logging
import multiprocessing
import os
import pickle
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from in_process import report
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision
from shipped_data import stand_in_trainer
from torch.utils.data import Dataset, get_worker_info

from lockstep.data import loaders
from lockstep.data.datamodule import DataModule
from lockstep.data.dataset import Arrays, DataSet, samples_of
from lockstep.data.loaders import FromWorkers, Indexed, InMemory, fetch
from lockstep.data.sampler import EvalSampler, Split, TrainBatches
from lockstep.errors import LostProcess, TrainingFailed, UserError

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
    """A custom object, which gives several at a time and is never asked for a filler."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays.arrays

    def __getitem__(self, indices):
        assert (indices >= 0).all()
        return {name: array[indices] for name, array in self.arrays.items()}


def samplers() -> list:
    evaluation = Split(103, 0, 103, shuffled=False)
    return [
        TrainBatches(SPLIT, batch=20, seed=3, rank=1, world=2),
        EvalSampler(evaluation, batch=40, rank=1, world=2),  # the last batch has places without a sample
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
    memory = [
        {name: value.cpu() if torch.is_tensor(value) else value for name, value in batch.items()}
        for batch in InMemory(arrays, device).batches(samplers()[which])
    ]
    assert len(memory) == len(samplers()[which]) > 1
    assert np.array_equal(memory[0]["input"], arrays.arrays["input"][memory[0]["index"]])
    assert (memory[-1]["count"] < len(memory[-1]["index"])) == (which == 1)
    assert_same(memory, list(FromWorkers(arrays, samplers()[which], num_workers=0).batches()))


@pytest.mark.parametrize("form", [Pairs, Dicts, MapStyle])
def test_samples_give_the_same_batches_in_any_form(arrays, form):
    for sampler in samplers():
        own = FromWorkers(samples_of(form(arrays)), sampler, num_workers=0)
        assert_same(list(InMemory(arrays, None).batches(sampler)), list(own.batches()))


def test_arrays_of_different_lengths_are_rejected(arrays):
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
def test_numbers_of_several_shapes_are_rejected_by_name(value, sizes):
    class Ragged:
        def __getitem__(self, indices: np.ndarray) -> dict:
            return {"input": np.ones((len(indices), 3)), "tags": [["a"], ["b", "c"]], "tokens": value}

    with pytest.raises(UserError, match=f"`tokens` as numbers of several shapes: the first samples have {sizes}. Pad"):
        fetch(Ragged(), np.arange(2))
    for lengths in ((1, 2), (2, 2)):  # a list of tensors stays one
        value[:] = [torch.ones(length) for length in lengths]
        batch = fetch(Ragged(), np.arange(2))
        assert batch["tokens"] is value
        assert batch["tags"] == [["a"], ["b", "c"]]


# --- the datamodule ---


class Named(Dataset):
    """Samples of two inputs, with the names of their files."""

    def __len__(self):
        return 20

    def __getitem__(self, place):
        return {"left": place, "right": torch.full((3,), place, dtype=torch.uint8), "file": f"{place}.png"}


class TwoInputs(DataSet):
    def __init__(self):
        self.train = self.test = Named()

    def preprocess(self, batch):
        return {**batch, "right": batch["right"] / 255}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("plugin", "expected"), [(DoublePrecision(), torch.float64), (HalfPrecision("bf16-true"), torch.bfloat16)]
)
def test_inputs_get_the_precision_of_the_network_and_texts_stay(plugin, expected, workers):
    data = DataModule(TwoInputs(), batch_size=4, eval_batch_size=8, num_workers=workers)
    data.trainer = stand_in_trainer(precision=plugin)
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    assert [batch[name].dtype for name in ("left", "right", "index")] == [torch.int64, expected, torch.int64]
    assert batch["count"] == 4
    assert batch["file"] == [f"{place}.png" for place in batch["index"].tolist()]
    assert data.example(3)["file"] == ["0.png", "1.png", "2.png"]
    assert data.dataset.show(data.raw("train", [0])) == {}  # a page shows `input`, which this data lacks
    *_, last = data.test_dataloader()
    assert last["file"][: last["count"]] == [f"{place}.png" for place in range(16, 20)]


# --- worker processes ---


def test_a_dead_worker_ends_the_run_and_is_named(train, monkeypatch):
    fetched = Indexed.__getitem__

    def die(self, indices_B):
        if get_worker_info().id == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return fetched(self, indices_B)

    monkeypatch.setattr(Indexed, "__getitem__", die)
    # torch may see that it ended before it sees how
    message = r"DataLoader worker \(pid\D+\d+\) (is killed by signal: Killed|exited unexpectedly).* Try fewer data.num_workers"
    with pytest.raises(LostProcess, match=message):
        train("run=a", "data.num_workers=2")
    assert report("a")["status"] == "failed"


def test_the_workers_of_training_end_before_the_test(train, monkeypatch):
    before, left, made = set(multiprocessing.active_children()), [], DataModule.test_dataloader

    def looked(self):
        left.append(set(multiprocessing.active_children()) - before)
        return made(self)

    monkeypatch.setattr(DataModule, "test_dataloader", looked)
    train("run=a", "data.num_workers=1")
    assert left == [set()]


def test_batches_come_through_pipes_where_shared_memory_is_full(monkeypatch, caplog):
    def full(_):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2>: No space left on device (28)")

    class Boxed:
        def __getitem__(self, indices_B):
            boxes = [{"boxes": torch.full((i, 4), float(i))} for i in indices_B]
            return {"input": torch.arange(10.0)[indices_B], "name": [f"file {i}" for i in indices_B], "target": boxes}

    def batches(count: int):
        return list(FromWorkers(Boxed(), [np.array([1, 2]), np.array([3, -1])], num_workers=count).batches())

    wanted = batches(0)
    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with caplog.at_level(logging.WARNING):
        found = batches(2)
    assert len(caplog.records) == 1
    assert "/dev/shm has no room" in caplog.text
    for one, other in zip(wanted, found, strict=True):
        assert (one["name"], one["count"]) == (other["name"], other["count"])
        assert all(torch.equal(one[name], other[name]) for name in ("input", "index"))
        assert all(torch.equal(a["boxes"], b["boxes"]) for a, b in zip(one["target"], other["target"], strict=True))
    # the last room is left to semaphores, without which no worker starts
    monkeypatch.setattr(loaders.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**16))
    assert not Indexed(Boxed()).shares


def test_spawned_workers_map_the_file_again(arrays, tmp_path):
    for name, array in arrays.arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    mapped = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in arrays.arrays}
    content = pickle.dumps(Arrays(**mapped))
    assert len(content) < 1000 < arrays.nbytes
    for name, found in pickle.loads(content)[np.arange(103)].items():
        assert np.array_equal(found, arrays.arrays[name])
    part = pickle.loads(pickle.dumps(Arrays(input=mapped["input"][7:])))
    assert np.array_equal(part.arrays["input"], arrays.arrays["input"][7:])


def test_workers_that_cannot_be_started_say_why(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(torch.utils.data.DataLoader, "__iter__", full)
    with pytest.raises(TrainingFailed, match=r"2 processes that load data .* Too many open files.* data.num_workers=0"):
        list(FromWorkers({}, [], num_workers=2).batches())
