"""The data: arrays in memory. Change what is read here; Lockstep makes the batches."""

from pathlib import Path
from typing import Any

import numpy as np
from lockstep.data import Arrays, Images


class Digits(Images):
    """Two files of arrays in `root`: train.npz and test.npz."""

    mean, std = (0.5,), (0.5,)
    eval_batch_size = 256  # where loader.eval_batch_size is null

    def __init__(self, *, root: str, **images: Any) -> None:
        super().__init__(**images)
        self.train, self.test = (self.read(Path(root) / f"{part}.npz") for part in ("train", "test"))
        self.classes = [str(label) for label in np.unique(self.train.arrays["target"])]

    def read(self, path: Path) -> Arrays:
        with np.load(path) as file:
            return Arrays(input=file["input"], target=file["target"].astype(np.int64))
