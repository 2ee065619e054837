"""The base class of data sets. A data set knows nothing about processes, devices or checkpoints. Free of torch and NumPy.

A batch is a dict of named tensors of B samples. The data set provides `input`, `target` and whatever else its task reads. The
engine adds `index` (int64, each sample's index in its part, -1 for a filler) and `count` (the number of real samples,
which come first).
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, ClassVar

Batch = dict[str, Any]


class DataSet:
    """The data of a run. A subclass sets `train` and `test` (and `val` if the data has a validation part), or overrides `open_part`.

    Each is Arrays, a torch Dataset (one sample at a time: a dict, or (input, target)), or your own object with the methods
    of `Samples`. Without `val`, a fixed part of `train` is held out.
    """

    unit: ClassVar[str] = "samples"  # the word for samples in output: images, sentences, ...
    source: str = "disk"  # where the data came from, for the report
    notice: str | None = None  # a warning printed before training, e.g. that only a subset is used

    def open_part(self, part: str) -> Any:
        """Called for a part that was not set, when it is first used. Returns None for `val` if the data has none."""
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
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        """Mistakes in a `data` node, found before anything is read."""
        return ()

    def prepare(self) -> None:
        """Called once per machine before the processes start: download, decode, check. Cheap when called again."""

    @property
    def facts(self) -> dict[str, Any]:
        """Figures for the report, under data/, such as the number of skipped files."""
        return {}

    @cached_property
    def about(self) -> dict[str, Any]:
        """Plain values that a task needs, such as `classes`. Saved in every checkpoint. May be set in `__init__`."""
        return {}

    def paths(self, part: str) -> Any:
        """The files of a part's samples, in their order, for tables of predictions; None if the samples are not files."""
        return None

    def network_arguments(self) -> dict[str, Any]:
        """Arguments offered to the network, such as `in_channels`. It gets those that its signature names."""
        return {}

    @property
    def bytes_in_memory(self) -> int | None:
        """Size of in-memory data; None if workers read the samples one by one."""
        from lockstep.data.samples import Arrays

        parts = [part for part in (self.train, self.val, self.test) if part is not None]
        return sum(part.nbytes for part in parts) if all(isinstance(part, Arrays) for part in parts) else None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the content. A run resumes only on the same data."""
        from lockstep.data.samples import content_of

        digest = hashlib.sha256()
        for part in (self.train, self.val, self.test):
            digest.update(content_of(part) if part is not None else b"none")
        return digest.hexdigest()

    def preprocess(self, batch: Batch) -> Batch:
        """Converts every batch, on its device, to what the network and the loss take."""
        return batch
