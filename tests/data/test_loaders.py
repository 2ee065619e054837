"""Batches on their way to the network: the same from memory and from workers, in any form of samples, with what is no tensor."""

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
from shipped_data import divided, stand_in_trainer
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, TensorDataset, default_convert, get_worker_info

from lockstep.data.dataset import Arrays, DataSet, content_of
from lockstep.data.loaders import MicroBatches
from lockstep.data.parts import Part, batch_of
from lockstep.data.sampler import ComputedOrder, Split
from lockstep.errors import ProcessDied, UserError
from lockstep.extras.panels import shown
from lockstep.kit.datamodule import DataModule


@pytest.fixture
def arrays() -> Arrays:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (103, 3, 4, 5), dtype=np.uint8)
    return Arrays(input=images, target=random.integers(0, 10, 103))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("at_once", [1, 10 * 60 * 2, 2**19])  # a batch, three, all
def test_any_form_of_samples_gives_the_same_batches(arrays, at_once, workers, monkeypatch):
    monkeypatch.setattr("lockstep.data.loaders.AT_ONCE", at_once)
    values = {name: torch.from_numpy(array) for name, array in arrays.arrays.items()}
    tensors, batches = TensorDataset(*values.values()), SimpleNamespace(__getitems__=lambda indices: arrays[indices])
    split, order = Split(103, 10, 90), ComputedOrder(90)
    options = {"sampler": order, "drop_last": True, "collate_fn": default_convert, "num_workers": workers}
    for form in (arrays, Arrays(**arrays.arrays).to("cpu"), tensors, StackDataset(**values), batches):
        loader = DataLoader(Part(form, split), 20, **options)
        ranks = [divided(loader, seed=3, rank=rank, world=2) for rank in (0, 1)]
        indices = []
        for batch, _ in (item for step in zip(*ranks, strict=True) for item in step):
            indices += batch["index"].tolist()
            assert batch.keys() == {*values, "index"}
            assert all(torch.equal(batch[name], value[batch["index"]]) for name, value in values.items())
        assert indices == split.indices(order.at(np.arange(80), 3, 0)).tolist()


def module_of(samples, trainer, **options) -> DataModule:
    """A datamodule that trains and tests on the same samples."""
    data = DataSet()
    data.train = data.test = samples
    module = DataModule(data, batch_size=4, eval_batch_size=8, **options)
    module.trainer = trainer
    return module


@pytest.mark.parametrize(("device", "asked", "size", "expected"), [
    ("cuda", "auto", 100, True),  # a tenth of what is free
    ("cuda", "auto", 101, False), ("cuda", True, 900, True), ("cuda", False, 10, False), ("cpu", "auto", 10, False),
])  # fmt: skip
def test_on_device_decides_which_images_live_on_the_gpu(device, asked, size, expected, monkeypatch):
    moved = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 4000))
    monkeypatch.setattr(Arrays, "to", lambda _, device: moved.append(device))
    images = Arrays(input=np.zeros((size, 1), np.uint8))
    module_of(images, stand_in_trainer(device=device), on_device=asked).test_dataloader()
    assert moved == [torch.device(device)] * expected


def test_a_transform_of_single_samples_reads_from_the_host(arrays):
    """Also after a validation has moved the same arrays to a GPU. Texts are never moved."""
    arrays.on_device = {"input": pytest.fail}
    part = Part(arrays, Split(103, 0, 103, shuffled=False), lambda batch: {**batch, "input": batch["input"] + 1})
    assert torch.equal(part[3]["input"][0], torch.from_numpy(arrays.arrays["input"][3]) + 1)
    assert Arrays(input=np.zeros(2), text=np.array(["a", "b"])).to("cpu").on_device == {}


def test_a_dataset_that_draws_nothing_may_return_a_list():
    samples = StackDataset(input=torch.arange(10.0))
    for dataset in (samples, ConcatDataset([samples])):  # with and without `__getitems__`
        dataset.draws_random_numbers = False
        batches = [batch["input"] for batch, _ in divided(DataLoader(dataset, 4))]
        assert torch.cat(batches).tolist() == [*range(10)]


@pytest.mark.parametrize("value", [
    [["a"], ["b", "c"]], [[1.0], [2.0, 3.0]], [np.ones(2), np.ones(3)], [torch.ones(1), torch.ones(2)], [torch.ones(2)] * 2,
])  # fmt: skip
def test_lists_of_several_lengths_or_shapes_stay_lists(value):
    samples = SimpleNamespace(__getitems__=lambda _: {"input": np.ones((2, 3)), "value": value})
    assert batch_of(samples, [0, 1])["value"] is value


@pytest.mark.parametrize("sample", [(1, 2, 3), torch.ones(2)])
def test_samples_that_form_no_batch_are_rejected(sample):
    with pytest.raises(UserError, match=f"of list is a {type(sample).__name__}; expected a dict of named values, or"):
        batch_of([sample] * 4, np.arange(4))


def test_arrays_may_be_lists_tensors_and_texts():
    batch = batch_of(Arrays(input=torch.arange(3.0), target=[0, 1, 2], name=np.array(["a", "b", "c"])), [2, 0])
    assert batch["input"].tolist() == batch["target"].tolist() == batch["index"].tolist() == [2, 0]
    assert batch["name"] == ["c", "a"]
    with pytest.raises(UserError, match=r"have the lengths {'input': 3, 'target': 2}"):
        Arrays(input=[1, 2, 3], target=[1, 2])
    one, other = (Arrays(name=np.array([f"a{i}" for i in range(3)], object)) for _ in range(2))  # equal, not the same
    assert content_of(one) == content_of(other) != content_of(Arrays(name=np.array(["a0", "a1", "b"], object)))


@pytest.mark.parametrize(("plugin", "expected", "workers"), [
    (DoublePrecision(), torch.float64, 0), (HalfPrecision("bf16-true"), torch.bfloat16, 1),
])  # fmt: skip
def test_inputs_get_the_precision_of_the_network_and_texts_stay(plugin, expected, workers):
    samples = StackDataset(left=range(20), right=torch.arange(20.0), file=[f"{i}.png" for i in range(20)])
    module = module_of(samples, stand_in_trainer(precision=plugin), num_workers=workers)
    batch = module.on_after_batch_transfer(next(divided(module.train_dataloader()))[0], 0)
    assert [batch[name].dtype for name in ("left", "right", "index")] == [torch.int64, expected, torch.int64]
    assert batch["file"] == [f"{index}.png" for index in batch["index"].tolist()]
    assert shown(module.dataset, module.raw("train", [0])) == {}  # a page shows `input`, which this data lacks
    with pytest.raises(UserError, match=r"loader.on_device=true has no effect"):  # read one by one
        module_of(samples, None, on_device=True)


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
    # torch may see that it ended before it sees how, or while it receives a batch
    message = r"DataLoader worker (\(pid\D+\d+\) (is killed by signal: Killed|exited unexpectedly)|ended while it sent).* set a smaller loader.num_workers"
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
    np.save(tmp_path / "images.npy", arrays.arrays["input"])
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    assert len(pickle.dumps(Arrays(input=mapped))) < 1000 < mapped.nbytes
    for part in (mapped, mapped[7:]):
        received = pickle.loads(pickle.dumps(Arrays(input=part)))
        assert np.array_equal(received.arrays["input"], part)
