"""What becomes of a batch on its way to the network: its types, and what is no tensor."""

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision
from shipped_data import stand_in_trainer
from torch.utils.data import Dataset

from lockstep.data import Arrays, DataSet
from lockstep.data.datamodule import DataModule


class Pairs(DataSet):
    """Inputs of other names than `input`, which become floats on the device."""

    def __init__(self):
        self.train = self.test = Arrays(left=np.ones((20, 2), np.uint8), right=np.ones((20, 2), np.uint8))

    def preprocess(self, batch):
        return {**batch, "left": batch["left"] / 255, "right": batch["right"] / 255}


class Named(Dataset):
    """Samples with the names of their files."""

    def __len__(self):
        return 20

    def __getitem__(self, place):
        return {"input": torch.full((3,), place), "target": place % 2, "file": f"{place}.png"}


class Files(DataSet):
    def __init__(self):
        self.train = self.test = Named()


def module(data: DataSet, precision: object = None, done: int = 0, **options: object) -> DataModule:
    made = DataModule(data, batch_size=4, eval_batch_size=8, **options)
    made.trainer = stand_in_trainer(done=done, precision=precision)
    return made


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [(DoublePrecision(), torch.float64), (HalfPrecision("bf16-true"), torch.bfloat16)],
)
def test_every_input_has_the_precision_of_the_network(plugin, expected):
    data = module(Pairs(), plugin)
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    assert {name: batch[name].dtype for name in ("left", "right", "index")} == {
        "left": expected, "right": expected, "index": torch.int64
    }  # fmt: skip
    assert batch["count"] == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_texts_of_samples_stay_in_the_batch(workers):
    data = module(Files(), HalfPrecision("bf16-true"), num_workers=workers)
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    assert batch["file"] == [f"{place}.png" for place in batch["index"].tolist()]
    assert data.example(3)["file"] == ["0.png", "1.png", "2.png"]
    *_, last = data.test_dataloader()
    assert last["file"][: last["count"]] == [f"{place}.png" for place in range(16, 20)]


def test_training_begins_at_the_trainers_position_and_counts_how_long_it_waits():
    whole = [batch["index"].tolist() for batch in module(Pairs()).train_dataloader()]
    data = module(Pairs(), done=2)
    assert [batch["index"].tolist() for batch in data.train_dataloader()] == whole[2:]
    assert 0 < data.waited_s < 10
