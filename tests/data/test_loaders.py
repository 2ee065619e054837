"""Batches on their way to the network: the same from memory and from workers, in any form of samples, with what is no tensor."""

import errno
import gc
import logging
import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from in_process import report
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision
from shipped_data import stand_in_trainer
from torch.utils.data import StackDataset, TensorDataset, get_worker_info

from lockstep.data import loaders
from lockstep.data.datamodule import DataModule
from lockstep.data.dataset import Arrays, DataSet, Items, content_of
from lockstep.data.loaders import FromWorkers, Indexed, InMemory, Reader, WithEpoch
from lockstep.data.sampler import EvalSampler, Split, TrainBatches
from lockstep.errors import ProcessDied, TrainingFailed, UserError

DEVICES = [None, torch.device("cpu"), *[torch.device("cuda")] * torch.cuda.is_available()]


@pytest.fixture
def arrays() -> Arrays:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (103, 3, 4, 5), dtype=np.uint8)
    return Arrays(input=images, target=random.integers(0, 10, 103))


class MapStyle:
    """A custom object, which gives several at a time and is never asked for a filler."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays.arrays

    def __getitem__(self, indices):
        assert (indices >= 0).all()
        return {name: array[indices] for name, array in self.arrays.items()}


@pytest.mark.parametrize("at_once", [0, 10 * 60 * 2, 2**19])  # a batch, three, all
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampler", [
    TrainBatches(Split(103, 10, 90), batch=20, seed=3, rank=1, world=2),
    EvalSampler(Split(103, 0, 103, shuffled=False), batch=40, rank=1, world=2),  # the last batch has places without a sample
], ids=["train", "eval"])  # fmt: skip
def test_memory_and_workers_give_the_same_batches_of_samples_in_any_form(arrays, sampler, device, at_once, monkeypatch):
    monkeypatch.setattr(loaders, "AT_ONCE", at_once)
    named = {name: torch.from_numpy(array) for name, array in arrays.arrays.items()}
    forms = (arrays, TensorDataset(*named.values()), StackDataset(**named), MapStyle(arrays))
    of_forms = [FromWorkers(Indexed(Reader(form, seed=0)), sampler=WithEpoch(sampler)).batches() for form in forms]
    batches = [InMemory(arrays, device).batches(sampler), *of_forms]
    seen = 0
    for index_B, *several in zip(sampler, *batches, strict=True):
        count = int((index_B >= 0).sum())
        assert (index_B[:count] >= 0).all()  # the real ones come first
        seen += count
        for batch in several:
            assert (batch.keys(), batch["count"]) == ({*named, "index", "count"}, count)
            assert np.array_equal(batch["index"], index_B)
            for name, values in named.items():
                assert torch.equal(batch[name][:count].cpu(), values[index_B[:count]])
                assert len(batch[name]) == len(index_B)
    assert seen == (40 if isinstance(sampler, TrainBatches) else 43)


@pytest.mark.parametrize(("device", "asked", "size", "expected"), [
    ("cuda", "auto", 100, "cuda"),  # a tenth of what is free
    ("cuda", "auto", 101, None), ("cuda", True, 900, "cuda"), ("cuda", False, 1, None), ("cpu", "auto", 1, None),
])  # fmt: skip
def test_images_live_on_the_gpu_if_they_are_asked_to_or_take_little_of_it(device, asked, size, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 4000))
    data = SimpleNamespace(device=torch.device(device), on_device=asked)
    images = Arrays(input=np.zeros((size, 1), np.uint8))
    assert DataModule.memory_device(data, images) == (expected and torch.device(expected))


@pytest.mark.parametrize(
    ("value", "sizes"), [([[1.0], [2.0, 3.0]], "1, 2"), ([np.ones((2, 4)), np.ones((3, 4))], r"\(2, 4\), \(3, 4\)")]
)
def test_numbers_of_several_shapes_and_lengths_are_rejected_by_name(arrays, value, sizes):
    with pytest.raises(ValueError, match=r"one row per sample, .*'input': 103, 'target': 102"):
        Arrays(input=arrays.arrays["input"], target=arrays.arrays["target"][1:])

    class Ragged:
        def __getitem__(self, indices: np.ndarray) -> dict:
            return {"input": np.ones((len(indices), 3)), "tags": [["a"], ["b", "c"]], "tokens": value}

    with pytest.raises(
        UserError, match=f"the shape of `tokens` differs between samples: the first ones have {sizes}. Pad"
    ):
        Reader(Ragged(), seed=0)(np.arange(2))
    for lengths in ((1, 2), (2, 2)):  # a list of tensors stays one
        value[:] = [torch.ones(length) for length in lengths]
        batch = Reader(Ragged(), seed=0)(np.arange(2))
        assert batch["tokens"] is value
        assert batch["tags"] == [["a"], ["b", "c"]]


@pytest.mark.parametrize(("samples", "told"), [
    ([(1, 2, 3)] * 4, "a sample of list is a tuple; expected a dict of named values, or"),
    ([torch.ones(2)] * 4, "a sample of list is a Tensor; expected"),
    ([(torch.ones(1 + i), i) for i in range(4)], r"samples of list cannot be collated: .*equal size.* Pad them to one shape"),
    ([{"input": 1, "more": None}] * 4, r"samples of list cannot be collated: .*found <class 'NoneType'>"),
])  # fmt: skip
def test_samples_of_a_torch_dataset_that_form_no_batch_are_rejected(samples, told):
    with pytest.raises(UserError, match=told):
        Items(samples)[np.arange(4)]


# --- the datamodule ---


class TwoInputs(DataSet):
    """With the names of files."""

    def __init__(self):
        right, files = [torch.full((3,), i, dtype=torch.uint8) for i in range(20)], [f"{i}.png" for i in range(20)]
        self.train = self.test = StackDataset(left=range(20), right=right, file=files)

    def preprocess(self, batch):
        return {**batch, "right": batch["right"] / 255}


def test_arrays_may_be_lists_tensors_and_texts():
    data = DataSet()
    data.train = data.test = Arrays(
        input=torch.arange(20.0), target=list(range(20)), name=np.array([*"abcdefghijklmnopqrst"])
    )
    made = DataModule(data, batch_size=4, eval_batch_size=8)
    made.trainer = stand_in_trainer()
    batch = next(iter(made.train_dataloader()))
    assert batch["input"].tolist() == batch["target"].tolist() == batch["index"].tolist()
    assert batch["name"] == [chr(ord("a") + index) for index in batch["index"].tolist()]
    with pytest.raises(UserError, match=r"have the lengths {'input': 3, 'target': 2}"):
        Arrays(input=[1, 2, 3], target=[1, 2])


def test_the_fingerprint_of_texts_that_are_objects_is_one_of_the_texts():
    names = [["".join(["a", str(i)]) for i in range(3)] for _ in range(2)]  # equal, and not the same
    one, other, third = (Arrays(name=np.array(each, dtype=object)) for each in (*names, ["a0", "a1", "b"]))
    assert content_of(one) == content_of(other) != content_of(third)


@pytest.mark.parametrize(
    ("plugin", "expected", "workers"),
    [(DoublePrecision(), torch.float64, 0), (HalfPrecision("bf16-true"), torch.bfloat16, 1)],
)
def test_inputs_get_the_precision_of_the_network_and_texts_stay(plugin, expected, workers):
    data = DataModule(TwoInputs(), batch_size=4, eval_batch_size=8, num_workers=workers)
    data.trainer = stand_in_trainer(precision=plugin)
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    assert [batch[name].dtype for name in ("left", "right", "index")] == [torch.int64, expected, torch.int64]
    assert batch["count"] == 4
    assert batch["file"] == [f"{place}.png" for place in batch["index"].tolist()]
    assert data.raw("train", [0, 1, 2])["file"] == ["0.png", "1.png", "2.png"]
    assert data.dataset.show(data.raw("train", [0])) == {}  # a page shows `input`, which this data lacks
    with pytest.raises(UserError, match=r"loader.on_device=true has no effect"):
        DataModule(TwoInputs(), batch_size=4, eval_batch_size=8, on_device=True)  # it is not held in memory
    *_, last = data.test_dataloader()
    assert last["file"][: last["count"]] == [f"{place}.png" for place in range(16, 20)]


# --- worker processes ---


@pytest.mark.slow
def test_the_workers_of_a_loader_end_when_another_takes_its_place():
    data = DataModule(TwoInputs(), batch_size=4, eval_batch_size=8, num_workers=1)
    data.trainer = stand_in_trainer()
    before = {*multiprocessing.active_children()}
    for _ in range(3):  # trainer.reload_dataloaders_every_n_epochs=1
        next(iter(data.train_dataloader()))
        gc.collect()
    assert len({*multiprocessing.active_children()} - before) == 1
    data.teardown("fit")


@pytest.fixture
def fork() -> Iterator[None]:
    """Workers have what a test patched. Python 3.14 would start them by a server."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.slow
def test_a_dead_worker_ends_the_run_and_is_named(train, monkeypatch, fork):
    fetched = Indexed.__getitem__

    def die(self, place):
        if get_worker_info().id == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return fetched(self, place)

    monkeypatch.setattr(Indexed, "__getitem__", die)
    # torch may see that it ended before it sees how
    message = r"DataLoader worker \(pid\D+\d+\) (is killed by signal: Killed|exited unexpectedly).* Try a smaller loader.num_workers"
    with pytest.raises(ProcessDied, match=message):
        train("run=a", "loader.num_workers=2")
    assert report("a")["status"] == "failed"


@pytest.mark.slow
def test_the_workers_of_training_end_before_the_test(train, monkeypatch):
    before, left, made = set(multiprocessing.active_children()), [], DataModule.test_dataloader

    def looked(self):
        left.append(set(multiprocessing.active_children()) - before)
        return made(self)

    monkeypatch.setattr(DataModule, "test_dataloader", looked)
    train("run=a", "loader.num_workers=1")
    assert left == [set()]


def test_batches_come_through_pipes_where_shared_memory_is_full(monkeypatch, caplog, fork):
    def full(_):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2>: No space left on device (28)")

    class Boxed:
        def __getitem__(self, indices_B):
            boxes = [{"boxes": torch.full((i, 4), float(i))} for i in indices_B]
            return {"input": torch.arange(10.0)[indices_B], "name": [f"file {i}" for i in indices_B], "target": boxes}

    def batches(count: int):
        return list(
            FromWorkers(
                Indexed(Reader(Boxed(), seed=0)),
                sampler=WithEpoch([np.array([1, 2]), np.array([3, -1])]),
                num_workers=count,
            ).batches()
        )

    wanted = batches(0)
    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with caplog.at_level(logging.WARNING):
        found = batches(2)
    assert len(caplog.records) == 1
    assert "/dev/shm has too little free space" in caplog.text
    for one, other in zip(wanted, found, strict=True):
        assert (one["name"], one["count"]) == (other["name"], other["count"])
        assert all(torch.equal(one[name], other[name]) for name in ("input", "index"))
        assert all(torch.equal(a["boxes"], b["boxes"]) for a, b in zip(one["target"], other["target"], strict=True))
    # the last room is left to semaphores, without which no worker starts
    monkeypatch.setattr(loaders.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**16))
    assert not Indexed(Reader(Boxed(), seed=0)).shares


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
    with pytest.raises(TrainingFailed, match=r"2 loader workers .* Too many open files.* loader.num_workers=0"):
        list(FromWorkers(Indexed(Reader({}, seed=0)), num_workers=2).batches())
