"""Batches on their way to the network: the same from memory and from workers, in any form of samples, with what is no tensor."""

import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from in_process import report
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision
from shipped_data import divided, stand_in_trainer, training_batches
from torch.utils.data import DataLoader, StackDataset, TensorDataset, default_convert, get_worker_info

from lockstep.data import loaders
from lockstep.data.dataset import Arrays, DataSet, content_of
from lockstep.data.loaders import MicroBatches
from lockstep.data.parts import Part, batch_of
from lockstep.data.sampler import ComputedOrder, Split
from lockstep.errors import ProcessDied, UserError
from lockstep.kit.datamodule import DataModule


@pytest.fixture
def arrays() -> Arrays:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (103, 3, 4, 5), dtype=np.uint8)
    return Arrays(input=images, target=random.integers(0, 10, 103))


class MapStyle:
    """A custom object, which gives several at a time."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays.arrays

    def __len__(self) -> int:
        return 103

    def __getitems__(self, indices):
        return {name: array[indices] for name, array in self.arrays.items()}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("at_once", [1, 10 * 60 * 2, 2**19])  # a batch, three, all
@pytest.mark.parametrize("trains", [True, False])
def test_samples_in_any_form_give_the_same_batches_from_this_process_and_workers(
    arrays, trains, at_once, workers, monkeypatch
):
    monkeypatch.setattr(loaders, "AT_ONCE", at_once)
    named = {name: torch.from_numpy(array) for name, array in arrays.arrays.items()}
    forms = (
        arrays,
        Arrays(**arrays.arrays).to("cpu"),
        TensorDataset(*named.values()),
        StackDataset(**named),
        MapStyle(arrays),
    )
    split = Split(103, 10, 90) if trains else Split(103, 0, 103, shuffled=False)
    options = {"batch_size": 20, "sampler": ComputedOrder(90), "drop_last": True} if trains else {"batch_size": 40}
    options |= {"collate_fn": default_convert, "num_workers": workers}
    both = [
        [[batch for batch, _ in divided(DataLoader(Part(form, split), **options), seed=3, rank=rank, world=2, trains=trains)] for form in forms]
        for rank in (0, 1)
    ]  # fmt: skip
    seen = []
    for of_forms in both:
        for several in zip(*of_forms, strict=True):
            index_B = several[0]["index"]
            seen += index_B.tolist()
            for batch in several:
                assert batch.keys() == {*named, "index"}
                assert torch.equal(batch["index"], index_B)
                assert all(torch.equal(batch[name], values[index_B]) for name, values in named.items())
    assert len(seen) == len({*seen}) == (80 if trains else 103)


@pytest.mark.parametrize(("device", "asked", "size", "expected"), [
    ("cuda", "auto", 100, True),  # a tenth of what is free
    ("cuda", "auto", 101, False), ("cuda", True, 900, True), ("cuda", False, 1, False), ("cpu", "auto", 1, False),
])  # fmt: skip
def test_images_live_on_the_gpu_if_they_are_asked_to_or_take_little_of_it(device, asked, size, expected, monkeypatch):
    moved = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 4000))
    monkeypatch.setattr(Arrays, "to", lambda _, device: moved.append(device))
    data = DataSet()
    data.train, data.test = (Arrays(input=np.zeros((count, 1), np.uint8)) for count in (9, size))
    made = DataModule(data, batch_size=1, eval_batch_size=1, on_device=asked)
    made.trainer = stand_in_trainer(device=device)
    made.test_dataloader()
    assert moved == [torch.device(device)] * expected


def test_what_changes_single_samples_reads_them_from_the_host(arrays):
    """Also where a validation has moved the same arrays to a GPU. Texts are not moved."""
    arrays.on_device = {"input": pytest.fail}
    part = Part(arrays, Split(103, 0, 103, shuffled=False), lambda batch: {**batch, "input": batch["input"] + 1})
    assert torch.equal(part[3]["input"][0], torch.from_numpy(arrays.arrays["input"][3]) + 1)
    assert Arrays(input=np.zeros(2), text=np.array(["a", "b"])).to("cpu").on_device == {}


class OneByOne(list):
    """Its samples draw nothing, and there is no `__getitems__`."""

    draws_random_numbers = False


class Listed(OneByOne):
    def __getitems__(self, indices: list[int]) -> list:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [OneByOne, Listed])
def test_a_dataset_that_draws_nothing_may_return_samples_one_by_one(kind):
    samples = kind({"input": torch.full((2,), float(index))} for index in range(10))
    found = torch.cat([batch["input"] for batch, _ in divided(DataLoader(samples, 4))])
    assert found[:, 0].tolist() == [float(index) for index in range(10)]


def test_lists_of_several_lengths_or_shapes_stay_lists():
    values = (
        [[1.0], [2.0, 3.0]],
        [np.ones((2, 4)), np.ones((3, 4))],
        [torch.ones(1), torch.ones(2)],
        [torch.ones(2)] * 2,
    )

    class Ragged:
        def __getitems__(self, indices: list[int]) -> dict:
            return {"input": np.ones((len(indices), 3)), "tags": [["a"], ["b", "c"]], "tokens": value}

    for value in values:
        batch = batch_of(Ragged(), np.arange(2))
        assert batch["tokens"] is value and batch["tags"] == [["a"], ["b", "c"]]


@pytest.mark.parametrize(("samples", "told"), [
    ([(1, 2, 3)] * 4, "a sample of list is a tuple; expected a dict of named values, or"),
    ([torch.ones(2)] * 4, "a sample of list is a Tensor; expected"),
])  # fmt: skip
def test_samples_of_a_torch_dataset_that_form_no_batch_are_rejected(samples, told):
    with pytest.raises(UserError, match=told):
        batch_of(samples, np.arange(4))


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
    batch = next(training_batches(made))
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
    batch = data.on_after_batch_transfer(next(divided(data.train_dataloader()))[0], 0)
    assert [batch[name].dtype for name in ("left", "right", "index")] == [torch.int64, expected, torch.int64]
    assert batch["file"] == [f"{place}.png" for place in batch["index"].tolist()]
    assert data.raw("train", [0, 1, 2])["file"] == ["0.png", "1.png", "2.png"]
    assert data.dataset.show(data.raw("train", [0])) == {}  # a page shows `input`, which this data lacks
    with pytest.raises(UserError, match=r"loader.on_device=true has no effect"):
        DataModule(TwoInputs(), batch_size=4, eval_batch_size=8, on_device=True)  # it is not held in memory
    *_, (last, _) = divided(data.test_dataloader()[0], trains=False)
    assert last["file"] == [f"{place}.png" for place in range(16, 20)]


# --- worker processes ---


@pytest.fixture
def fork() -> Iterator[None]:
    """Workers have what a test patched. Python 3.14 would start them by a server."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.slow
def test_a_dead_worker_ends_the_run_and_is_named(train, monkeypatch, fork):
    fetched = MicroBatches.__getitem__

    def die(self, place):
        if get_worker_info().id == 1 and place.number > 8:  # beyond what is prefetched before the first step
            os.kill(os.getpid(), signal.SIGKILL)
        return fetched(self, place)

    monkeypatch.setattr(MicroBatches, "__getitem__", die)
    # torch may see that it ended before it sees how
    message = r"DataLoader worker \(pid\D+\d+\) (is killed by signal: Killed|exited unexpectedly).* set a smaller loader.num_workers"
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


def test_a_worker_without_shared_memory_fails(monkeypatch, fork):
    """torch would wait for its batch forever."""

    def full(_):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with pytest.raises(RuntimeError, match="No space left on device"):
        [*divided(DataLoader(torch.arange(4), 2, num_workers=1), trains=False)]


def test_spawned_workers_map_the_file_again(arrays, tmp_path):
    for name, array in arrays.arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    mapped = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in arrays.arrays}
    content = pickle.dumps(Arrays(**mapped))
    assert len(content) < 1000 < arrays.nbytes
    for name, found in pickle.loads(content).__getitems__(range(103)).items():
        assert np.array_equal(found, arrays.arrays[name])
    part = pickle.loads(pickle.dumps(Arrays(input=mapped["input"][7:])))
    assert np.array_equal(part.arrays["input"], arrays.arrays["input"][7:])
