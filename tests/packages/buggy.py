"""A network, a callback and data whose bug is where a file in the working directory says, for tests/test_users_bugs.py."""

from pathlib import Path

import lightning.pytorch as pl
from torch.utils.data import Dataset

from project.data import Mnist
from project.model import BasicNet


def bug(place):
    if Path("bug").read_text() == place:
        raise ValueError(f"my bug in {place}")  # an error that Lightning raises as well


class Net(BasicNet):
    def __init__(self, **given):
        bug("the constructor")
        super().__init__(**given)

    def forward(self, image):
        bug("forward")
        return super().forward(image)


class Watch(pl.Callback):
    def on_train_batch_end(self, *_):
        bug("a step")


class Items(Dataset):
    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        return len(self.arrays)

    def __getitem__(self, place):
        bug("a worker")


class Digits(Mnist):
    def __init__(self, **given):
        bug("the data's constructor")
        super().__init__(**given)

    @property
    def train(self):
        return Items(super().train) if Path("bug").read_text() == "a worker" else super().train

    def preprocess(self, batch):
        bug("the data")
        return super().preprocess(batch)
