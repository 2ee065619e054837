"""The base class of data sets. A data set knows nothing about processes, devices or checkpoints. Free of torch.

A batch is a dict of named tensors of B samples. The data set provides `input`, `target` and whatever else its task reads. The
engine adds `index` (int64, each sample's index in its part, -1 for a filler) and `count` (the number of real samples,
which come first).
"""

import hashlib
import mmap
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Batch = dict[str, Any]


class Samples(Protocol):
    """Map-style samples, read several at a time."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Indices) -> Mapping[str, Any]:
        """The samples at `indices`, as named arrays or tensors whose first dimension is the sample."""
        ...


class Arrays:
    """Named arrays of N samples, in memory or mapped from a file that all processes share."""

    def __init__(self, **arrays: NDArray[Any]) -> None:
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"the arrays of a data set have one length; these have {lengths}")
        self.arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, indices: Indices) -> dict[str, NDArray[Any]]:
        # `wrap` replaces a filler, -1, by some sample.
        return {name: array.take(indices, axis=0, mode="wrap") for name, array in self.arrays.items()}

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def sample_bytes(self) -> int:
        return self.nbytes // max(1, len(self))

    def __getstate__(self) -> dict[str, Any]:
        """For spawned workers: sends the path of a mapped file, where pickle would copy its bytes."""
        return {name: place_of(array) if is_whole_file(array) else array for name, array in self.arrays.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.arrays = {name: np.memmap(**a) if isinstance(a, dict) else a for name, a in state.items()}


def is_whole_file(array: NDArray[Any]) -> bool:
    """Whether an array is a whole mapped file: a slice does not know its offset in the file."""
    return isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap) and bool(array.flags.c_contiguous)


def place_of(array: Any) -> dict[str, Any]:
    """The arguments of np.memmap for the same array."""
    return {"filename": array.filename, "dtype": array.dtype, "mode": "r", "offset": array.offset, "shape": array.shape}


class DataSet:
    """The data of a run. A subclass sets `train` and `test`, and `val` if the data has a validation part.

    Each is Arrays, a torch Dataset (one sample at a time: a dict, or (input, target)), or your own object with the methods
    of `Samples`. Without `val`, a fixed part of `train` is held out.
    """

    unit: ClassVar[str] = "samples"  # the word for samples in output: images, sentences, ...
    source: str = "disk"  # where the data came from, for the report
    notice: str | None = None  # a warning printed before training, e.g. that only a subset is used

    train: Any
    test: Any
    val: Any = None

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> list[str]:
        """Mistakes in a `data` node, found before anything is read."""
        return []

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

    def network_arguments(self) -> dict[str, Any]:
        """Arguments offered to the network, such as `in_channels`. It gets those that its signature names."""
        return {}

    @property
    def bytes_in_memory(self) -> int | None:
        """Size of in-memory data; None if workers read the samples one by one."""
        parts = [part for part in (self.train, self.val, self.test) if part is not None]
        return sum(part.nbytes for part in parts) if all(isinstance(part, Arrays) for part in parts) else None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the content. A run resumes only on the same data."""
        digest = hashlib.sha256()
        for part in (self.train, self.val, self.test):
            digest.update(content_of(part) if part is not None else b"none")
        return digest.hexdigest()

    def augment(self, batch: Batch, *, seed: int, epoch: int) -> Batch:
        """Augments a training batch on its device. Use only (seed, epoch, batch["index"]) as randomness to stay reproducible."""
        return batch

    def preprocess(self, batch: Batch) -> Batch:
        """Converts every batch, on its device, to what the network and the loss take."""
        return batch


def content_of(samples: Any) -> bytes:
    """Bytes that identify the data: the whole of Arrays; of anything else its class, length and some samples."""
    digest = hashlib.sha256()
    if isinstance(samples, Arrays):
        for name, array in samples.arrays.items():
            digest.update(f"{name}{array.dtype}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    else:
        digest.update(f"{type(samples).__qualname__}{len(samples)}".encode())
        for place in np.linspace(0, len(samples) - 1, num=min(8, len(samples))).astype(int):
            digest.update(np.asarray(flat_bytes(samples, int(place))).tobytes())
    return digest.digest()


def flat_bytes(samples: Any, place: int) -> bytes:
    """The numbers and strings of one sample, as bytes."""
    sample = samples[place] if hasattr(samples, "__getitems__") or is_torch(samples) else samples[np.array([place])]
    parts = sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, tuple | list) else [sample]
    return b"".join(str(part).encode() if isinstance(part, str) else np.asarray(part).tobytes() for part in parts)


def is_torch(samples: Any) -> bool:
    """Whether it is a torch Dataset, which returns one sample at a time; found out without importing torch."""
    return any(base.__module__.startswith("torch.utils.data") for base in type(samples).__mro__)
