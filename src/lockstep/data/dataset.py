"""What a data set says about itself. It knows nothing of processes, devices or checkpoints. Free of torch.

A batch is a dict of named tensors of B samples. The data set names `input`, `target` and whatever else its task reads;
the engine adds `index` (int64, each sample's place in its split, -1 for a filler) and `count` (how many samples are
real: they come first).
"""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from lockstep.data.samples import Arrays, content_of

Batch = dict[str, Any]


class DataSet:
    """What a run trains on. A subclass sets `train` and `test`, and `val` if the data has its own, or has `open_part`.

    Each is Arrays, a torch Dataset (one sample at a time: a dict, or (input, target)), or an object of one's own with
    the methods of `Samples`. Without `val`, a fixed part of `train` is held out.
    """

    unit: ClassVar[str] = "samples"  # what a sample is called where people read: images, sentences, ...
    source: str = "disk"  # where the data came from, for the report
    notice: str | None = None  # what people should know of it before they believe a figure

    def open_part(self, part: str) -> Any:
        """`train`, `val` or `test` when it is first wanted, where it was not set; None for a `val` that there is not."""
        if part == "val":
            return None
        raise NotImplementedError(f"{type(self).__name__} sets no `{part}` in its __init__")

    @cached_property
    def train(self) -> Any:
        return self.open_part("train")

    @cached_property
    def val(self) -> Any:
        return self.open_part("val")

    @cached_property
    def test(self) -> Any:
        return self.open_part("test")

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> list[str]:
        """What is wrong with a `data` node, before anything is read."""
        return []

    def prepare(self) -> None:
        """Called once per machine before the processes start: fetch, decode, check. Then cheap when called again."""

    @property
    def facts(self) -> dict[str, Any]:
        """Figures of the data for the report, under data/, such as how many files were skipped."""
        return {}

    @cached_property
    def about(self) -> dict[str, Any]:
        """Plain values that a task needs, such as `classes`. They are kept in every checkpoint. May be set in `__init__`."""
        return {}

    def network_arguments(self) -> dict[str, Any]:
        """What a network may ask for by naming the argument, such as `in_channels`."""
        return {}

    @property
    def bytes_in_memory(self) -> int | None:
        """Of data that is indexed in memory; None for what is read or decoded sample by sample, which workers do."""
        parts = [part for part in (self.train, self.val, self.test) if part is not None]
        return sum(part.nbytes for part in parts) if all(isinstance(part, Arrays) for part in parts) else None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the content. A run does not resume on other data."""
        digest = hashlib.sha256()
        for part in (self.train, self.val, self.test):
            digest.update(content_of(part) if part is not None else b"none")
        return digest.hexdigest()

    def augment(self, batch: Batch, *, seed: int, epoch: int) -> Batch:
        """Changes a training batch on its device. Draw from (seed, epoch, batch["index"]) alone to stay reproducible."""
        return batch

    def preprocess(self, batch: Batch) -> Batch:
        """Makes of every batch, on its device, what the network and the loss take."""
        return batch
