"""An index operation in memory gives the batches that a DataLoader with workers gives; no process copies the images."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lockstep.data import loaders
from lockstep.data.datamodule import DataModule
from lockstep.data.loaders import IGNORED, Images, InMemory, MemoryLoader, Place, WorkerLoader
from lockstep.data.sampler import EvalBatches, Split, TrainBatches

SPLIT = Split(103, 10, 90)


@pytest.fixture
def arrays():
    random = np.random.default_rng(0)
    return random.integers(0, 256, (103, 3, 4, 5), dtype=np.uint8), random.integers(0, 10, 103, dtype=np.uint8)


def samplers() -> list:
    evaluation = Split(103, 0, 103, shuffled=False)
    return [
        TrainBatches(SPLIT, batch=20, seed=3, rank=1, world=2),
        EvalBatches(evaluation, batch=40, rank=1, world=2),  # the last batch has places without a sample
    ]


@pytest.mark.parametrize("at_once", [0, 10 * 60 * 2, 2**19])  # a batch, three, all
@pytest.mark.parametrize("device", [None, torch.device("cpu")])
@pytest.mark.parametrize("which", [0, 1])
def test_memory_and_workers_give_the_same_batches(arrays, which, device, at_once, monkeypatch):
    monkeypatch.setattr(loaders, "AT_ONCE", at_once)
    memory = MemoryLoader(InMemory(*arrays, device), samplers()[which])
    workers = WorkerLoader(Images(*arrays), sampler=samplers()[which], batch_size=None)
    batches = list(zip(memory, workers, strict=True))
    assert len(batches) == len(memory) > 1
    for (image, label, index), (expected_image, expected_label, expected_index) in batches:
        assert torch.equal(label, expected_label)
        assert torch.equal(index, expected_index)
        there = index >= 0
        assert torch.equal(image[there], expected_image[there])
        assert (label[~there] == IGNORED).all()
    assert which == 0 or (batches[-1][0][1] == IGNORED).any()


def test_images_on_the_cpu_are_the_given_array_itself(arrays):
    there = InMemory(*arrays, None)
    assert np.shares_memory(there.images_NCHW, arrays[0])


def test_spawned_workers_map_the_file_again(arrays, tmp_path):
    paths = [tmp_path / f"{name}.npy" for name in ("images", "labels")]
    for path, array in zip(paths, arrays, strict=True):
        np.save(path, array)
    content = pickle.dumps(Images(*(np.load(path, mmap_mode="r") for path in paths)))
    assert len(content) < 1000 < arrays[0].nbytes
    again = pickle.loads(content)
    assert isinstance(again.images_NCHW, np.memmap)
    part = pickle.loads(pickle.dumps(Images(np.load(paths[0], mmap_mode="r")[7:], arrays[1])))
    assert np.array_equal(part.images_NCHW, arrays[0][7:])
    for found, expected in zip(again[np.arange(103)], Images(*arrays)[np.arange(103)], strict=True):
        assert torch.equal(found, expected)


def test_a_batch_is_the_stored_images_in_order(arrays):
    image, label, index = InMemory(*arrays, None).batch(np.array([5, 102, 0]))
    assert np.array_equal(image.numpy(), arrays[0][[5, 102, 0]])
    assert label.tolist() == arrays[1][[5, 102, 0]].tolist()
    assert (label.dtype, index.tolist()) == (torch.int64, [5, 102, 0])


def test_training_begins_where_it_stands_and_knows_how_long_it_waited(arrays):
    images, (sampler, _) = InMemory(*arrays, None), samplers()
    whole = [index for *_, index in MemoryLoader(images, sampler)]
    place = Place(lambda: 2)
    rest = [index for *_, index in MemoryLoader(images, sampler, place=place)]
    assert [i.tolist() for i in rest] == [i.tolist() for i in whole[2:]]
    assert 0 < place.waited_s < 10


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
    data = SimpleNamespace(device=torch.device(device), on_device=asked, prepared=SimpleNamespace(images_bytes=size))
    assert DataModule.home(data) == (expected and torch.device(expected))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_images_on_the_gpu_give_the_same_batches(arrays):
    there, here = InMemory(*arrays, torch.device("cuda")), InMemory(*arrays, None)
    for indices in samplers()[1]:
        for of_gpu, of_cpu in zip(there.batch(indices), here.batch(indices), strict=True):
            assert of_gpu.device.type == "cuda"
            assert torch.equal(of_gpu.cpu(), of_cpu)
