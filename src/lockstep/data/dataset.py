"""The base class of data sets and the kinds of samples they may have. Does not import torch or Lightning."""

import contextlib
import hashlib
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from lockstep.data.sampler import PARTS, Indices, sample_states
from lockstep.errors import UserError

# --- Kinds of samples ---

CLASSES = ("target_N", "targets", "labels")  # attributes in which samples keep their classes
HELD = ("data", "targets", "labels")  # attributes in which torchvision's Datasets keep their arrays
READ = 32  # how many samples of a part its fingerprint reads


class Arrays:
    """Named arrays of N samples, in memory or memory-mapped from a file that all processes share."""

    draws_random_numbers = False

    def __init__(self, **arrays: NDArray[Any]) -> None:
        self.on_device: dict[str, Any] = {}
        self.arrays = {name: np.asanyarray(array) for name, array in arrays.items()}  # also lists and tensors
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if len(set(lengths.values())) != 1:
            raise UserError(f"Arrays need one row per sample, but have the lengths {lengths}. Give them one length.")

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: Any) -> dict[str, Any]:
        return {name: array[index] for name, array in self.arrays.items()}

    def __getitems__(self, indices: Sequence[int] | Indices) -> dict[str, Any]:
        """A batch. On the CPU, NumPy takes 0.06 ms per batch between BasicNet's steps, torch 0.20 ms."""
        if not self.on_device:
            index_N = np.asarray(indices)
            return {name: array.take(index_N, axis=0) for name, array in self.arrays.items()}
        import torch

        on_device_N = torch.as_tensor(indices).to(self.device, non_blocking=True)
        return {name: tensor.index_select(0, on_device_N) for name, tensor in self.on_device.items()}

    def to(self, device: Any) -> Self:
        """Copies the arrays to a device, once. Reading then returns tensors there."""
        import torch

        if not self.on_device and all(array.dtype.kind in "biufc" for array in self.arrays.values()):  # no texts
            self.device = device
            self.on_device = {name: torch.tensor(array, device=device) for name, array in self.arrays.items()}
        return self

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def __getstate__(self) -> dict[str, Any]:
        """For spawned workers: sends the path of a mapped file. Pickle would copy its bytes."""
        return {name: map_of(array) or array for name, array in self.arrays.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.arrays = {name: np.memmap(**a) if isinstance(a, dict) else a for name, a in state.items()}
        self.on_device = {}


def map_of(array: NDArray[Any]) -> dict[str, Any] | None:
    """The arguments of np.memmap for the same array if it is a whole mapped file. A slice does not store its offset."""
    if not isinstance(array, np.memmap) or not isinstance(array.base, mmap.mmap) or not array.flags.c_contiguous:
        return None
    return {"filename": array.filename, "dtype": array.dtype, "mode": "r", "offset": array.offset, "shape": array.shape}


# --- Reads samples of a part: Arrays, a torch Dataset, or anything with __len__ and __getitem__ or __getitems__ ---


def read(part: Any, index_N: Indices) -> Mapping[str, Any] | list[dict[str, Any]]:
    """The samples at these indices: a batch if `__getitems__` of the part returns one, or a list of dicts."""
    if isinstance(part, Arrays):
        return part.__getitems__(index_N)
    get_many = getattr(part, "__getitems__", lambda indices: [part[index] for index in indices])
    found = get_many(index_N.tolist())
    return found if isinstance(found, Mapping) else [named(sample, part) for sample in found]


def named(sample: Any, part: Any) -> dict[str, Any]:
    """A sample as a dict of named values. Raises UserError if it is neither a dict nor (input, target)."""
    pair = isinstance(sample, tuple | list) and len(sample) == 2
    if not pair and not isinstance(sample, Mapping):
        raise UserError(
            f"a sample of {type(part).__name__} is a {type(sample).__name__}; expected a dict of named values, or (input, target)."
        )
    values = dict(zip(("input", "target"), sample, strict=True) if pair else sample)
    return {name: np.float32(value) if isinstance(value, float) else value for name, value in values.items()}


def collate(samples: Mapping[str, Any] | list[dict[str, Any]]) -> Mapping[str, Any]:
    """A batch of samples, like torch's default. Boxes, keypoints and PIL images stay a list with one value per sample."""
    if isinstance(samples, Mapping):
        return samples
    from torch.utils.data import default_collate

    first = samples[0].items()
    separate = [name for name, value in first if is_pillow(value) or any(map(is_boxes, leaves_of(value)))]
    batch = default_collate([{n: v for n, v in sample.items() if n not in separate} for sample in samples])
    return {**batch, **{name: [sample[name] for sample in samples] for name in separate}}


def is_pillow(value: Any) -> bool:
    """Whether a value is a PIL image."""
    return type(value).__module__.startswith("PIL.")


def is_boxes(value: Any) -> bool:
    """Whether a value is torchvision's BoundingBoxes or KeyPoints. Their number differs between samples."""
    kind = type(value)
    return kind.__module__.startswith("torchvision.tv_tensors") and kind.__name__ in ("BoundingBoxes", "KeyPoints")


def targets_of(part: Any) -> NDArray[Any] | None:
    """The targets of a part as numbers, from Arrays, a TensorDataset of two tensors or an attribute of CLASSES."""
    tensors: Any = getattr(part, "tensors", ())
    if isinstance(part, Arrays):
        targets = part.arrays.get("target")
    elif len(tensors) == 2:
        targets = tensors[1]
    else:
        targets = next((value for name in CLASSES if (value := getattr(part, name, None)) is not None), None)
    with contextlib.suppress(ValueError, TypeError):  # lists of different lengths, bfloat16
        array: NDArray[Any] = np.asarray(targets)  # for None, an array without dimensions
        if array.ndim > 0 and array.dtype.kind in "biuf" and len(array) == len(part):
            return array
    return None


def classes_of(part: Any) -> NDArray[np.int64] | None:
    """class_N of a part's samples, if it stores them as one array."""
    array = targets_of(part)
    if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
        return None
    return array.astype(np.int64, copy=False)


LISTED = 12  # most names in a message


def join_names(names: Iterable[Any]) -> str:
    texts = [*map(str, names)]
    return ", ".join(texts[:LISTED]) + (f", ... ({len(texts):,} in all)" if len(texts) > LISTED else "")


# --- Fingerprints of samples ---


def add_arrays(digest: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
    for name, array in arrays.items():
        digest.update(f"{name}{array.dtype}{array.shape}".encode())
        # the bytes of an object array are pointers
        digest.update(repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).data)


def content_of(part: Any) -> bytes:
    """Digest of all of Arrays. Otherwise of a part's `fingerprint`, or of the arrays it holds and some samples."""
    digest, fingerprint = hashlib.sha256(), getattr(part, "fingerprint", None)
    if isinstance(part, Arrays):
        add_arrays(digest, part.arrays)
        return digest.digest()
    digest.update(f"{type(part).__qualname__}{len(part)}".encode())
    if isinstance(fingerprint, str):
        digest.update(fingerprint.encode())
        return digest.digest()
    for value in [*(getattr(part, name, None) for name in HELD), *getattr(part, "tensors", ())]:
        if hasattr(value, "dtype") or isinstance(value, list):
            with contextlib.suppress(ValueError):  # nested lists of different lengths do not form an array
                if (array := np.asarray(value)).dtype != object:
                    digest.update(array.tobytes())
    digest.update(bytes_of(part) or b"random")
    return digest.digest()


def bytes_of(part: Any) -> bytes | None:
    """Digest of samples, read one by one as shapes may differ; None if a second read with the same seed differs."""
    from lockstep.data.keyed import Generators  # imports torch

    digests, generators = [], Generators(part)
    for _ in range(2):
        digest = hashlib.sha256()
        for index_1 in np.unique(np.linspace(0, len(part) - 1, READ).astype(np.int64))[:, None]:
            states = partial(sample_states, "data", index_1, seed=0, epoch=0)
            (batch,) = generators.each(1, states, lambda _, index_1=index_1: collate(read(part, index_1)))  # type: ignore[misc]
            for value in leaves_of(list(batch.values())):
                digest.update(np.asarray(value).tobytes())
        digests.append(digest.digest())
    return digests[0] if digests[0] == digests[1] else None


def leaves_of(value: Any) -> Iterator[Any]:
    """The leaves of a nested value: an array of dicts would contain only pointers."""
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves_of(item)
    else:
        yield value


# --- The base class of data sets ---
#
# A batch is a dict of named tensors of B samples. The data set provides `input`, `target` and anything else that its
# task reads. The datamodule adds `index` (int64, each sample's index in its part).

Batch = dict[str, Any]


@dataclass(frozen=True)
class Sound:
    """A sound for a page to draw and play: int16 wave_T at `rate` samples per second, or a `file` for a browser."""

    wave_T: Any
    rate: int
    file: str = ""


class DataSet:
    """The data of a run. A subclass sets `train` and `test` (and `val` if the data has a validation part), or overrides
    `open_part`. `evaluation_sets`: further validation and test sets by logged name, such as "val/night", "test/night".

    A part is Arrays, a torch Dataset, or your own object with `__len__` and `__getitem__(index)`, which returns a dict or
    (input, target), or `__getitems__(indices)`, which may return a whole batch as a dict of arrays or tensors. Without
    `val`, a fixed part of `train` is held out.
    """

    unit: ClassVar[str] = "samples"  # the word for samples in output: images, sentences, ...
    source: str | None = None  # how the data was obtained: disk, download, ...
    eval_batch_size: int | None = None  # used if loader.eval_batch_size is null; None: as in training
    notice: str | None = None  # a warning printed before training, e.g. that only a subset is used
    # By part: names such as `classes` in the order of the part's own numbers, if it differs from that in `metadata`.
    part_names: Mapping[str, Mapping[str, Any]] = {}
    evaluation_sets: Mapping[str, Any] = {}

    def open_part(self, part: str) -> Any:
        """Called on first use of a part that was not set. Returns None for `val` if the data has none."""
        if part == "val":
            return None
        raise UserError(f"{type(self).__name__} has no {part} part. Set self.{part} in its __init__.")

    @cached_property
    def train(self) -> Any:
        return self.open_part("train")

    @cached_property
    def val(self) -> Any:
        return self.open_part("val")

    @cached_property
    def test(self) -> Any:
        return self.open_part("test")

    @property
    def every_part(self) -> tuple[str, ...]:
        return (*PARTS, *(self.evaluation_sets or ()))

    def samples(self, part: str) -> Any:
        return self.evaluation_sets[part] if "/" in part else getattr(self, part)

    @classmethod
    def problems(cls, data: Mapping[str, Any]) -> Iterable[str]:
        """Errors in a `data` node, detected before any data is read."""
        return ()

    def prepare(self) -> None:
        """Called once per machine before the processes start: download, decode, check. Cheap if called again."""

    @property
    def data_info(self) -> dict[str, Any]:
        """Metrics for the report, under data/, such as the number of skipped files."""
        return {}

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """Plain values that a task needs, such as `classes`. Saved in checkpoints. May be set in `__init__`."""
        return {}

    def paths(self, part: str) -> Any:
        """The file of each sample of a part, in order, for prediction tables; None if the samples are not files."""
        return None

    evaluates = False  # whether the run only evaluates; set before `prepare`
    operations: Mapping[str, Any] = {}  # of `augment`, by name; set before `prepare`
    datamodule: ClassVar[str] = "lockstep.kit.datamodule.DataModule"  # the class of its LightningDataModule

    def storage_plan(self) -> str | None:
        """What `prepare` will decode and into which folder, and how fast samples are read, as text; None: nothing."""
        return None

    @property
    def evaluated(self) -> "DataSet":
        """The same data as used in evaluation, such as with images of a different size."""
        return self

    def uncropped(self, part: str, least: int) -> Any:
        """Samples of a part with uncropped images of `least` pixels or more (0: all pixels); None if unsupported."""
        return None

    endings: ClassVar[tuple[str, ...]] = ("",)  # of files that `read` accepts; by default all

    def read(self, path: Path) -> "Mapping[str, Any] | Arrays":
        """Reads a file for predict.py and exported folders: returns one sample as in `train`, or Arrays of several.

        Several samples are, for example, the rows of a table or the lines of a text.

        `target` is optional. Any exception means that the file cannot be read. It needs no training data: `metadata`
        comes from the checkpoint and `__init__` is not called, so `read`, `preprocess` and `show` can use only `metadata`.
        """
        raise NotImplementedError

    @classmethod
    def for_files(cls, metadata: Mapping[str, Any]) -> Self:
        """The data set without training data, to read files. Raises UserError if a checkpoint's `metadata` lacks keys."""
        dataset = cls.__new__(cls)
        dataset.metadata = dict(metadata)
        return dataset

    def mask_size(self, path: Path) -> tuple[int, int] | None:
        """Width and height at which the predicted mask of a file is saved; None: those of the network's output."""
        return None

    def show(self, sample: Mapping[str, Any]) -> dict[str, Any] | None:
        """What a page shows for a sample, by name: an `image` (uint8, CHW), a Sound, texts, numbers. None: what its type and `metadata` tell."""
        return None

    def model_kwargs(self) -> dict[str, Any]:
        """Arguments for the network, such as `in_channels`. Only those in its signature are passed."""
        return {}

    @property
    def bytes_in_memory(self) -> int | None:
        """Size of in-memory data; None if workers read the samples one by one."""
        parts = [part for part in map(self.samples, self.every_part) if part is not None]
        return sum(part.nbytes for part in parts) if all(isinstance(part, Arrays) for part in parts) else None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the content. A run can resume only on the same data."""
        digest = hashlib.sha256()
        for part in map(self.samples, self.every_part):
            digest.update(content_of(part) if part is not None else b"none")
        return digest.hexdigest()

    def preprocess(self, batch: Batch) -> Batch:
        """Converts every batch, on its device, to what the network and the loss expect."""
        return batch
