"""Two ways to batches: indexing images that are in memory, or torch's DataLoader with workers."""

# B batch · C channel · H W pixel · N sample

import itertools
import mmap
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep.data.sampler import FILLER, EvalBatches, Indices, TrainBatches

Batch = tuple[Tensor, Tensor, Tensor]  # image_BCHW, label_B, index_B in the data set
AT_ONCE = 2**22  # bytes of images. BasicNet's bf16 step waited 0.9 % of its time so, and 2.0 % one batch at a time
IGNORED = -100  # the label of a place without a sample: cross_entropy's ignore_index


@dataclass
class Place:
    """Where training is, and how long it has waited for its batches."""

    position: Callable[[], int]  # in micro-batches of the epoch
    waited_s: float = 0.0


class Placed:
    """A loader that begins when its first batch is wanted, at `place`.

    Lightning makes the iterator before it restores a checkpoint and sets the epoch; workers would fetch batches of
    epoch 0 by then. The position is the Trainer's own, which checkpoints keep: the loader has no state.
    """

    sampler: Any
    place: Place | None = None

    def batches(self) -> Iterator[Batch]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Batch]:
        place = self.place
        if place is None:
            yield from self.batches()
            return
        self.sampler.start = place.position()
        batches = self.batches()
        while True:
            began_s = time.perf_counter()
            batch = next(batches, None)
            place.waited_s += time.perf_counter() - began_s
            if batch is None:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load. Having both methods tells Lightning that resuming in mid-epoch is right."""


class InMemory:
    """uint8 images_NCHW and their labels on a device; with None they stay the mapped file, which all processes share."""

    def __init__(
        self, images_NCHW: NDArray[np.uint8], labels_N: NDArray[np.uint8], device: torch.device | None
    ) -> None:
        self.device = device
        self.images_NCHW = np.asarray(images_NCHW)
        self.image_bytes = self.images_NCHW[:1].nbytes
        self.labels = np.append(labels_N.astype(np.int64), IGNORED)  # at -1, FILLER's place
        if device is not None:
            with warnings.catch_warnings():  # nobody writes to it
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                self.images_on_device = torch.from_numpy(self.images_NCHW).to(device)
            self.labels_on_device = torch.from_numpy(self.labels).to(device)

    def batch(self, indices_B: Indices) -> Batch:
        index_B = torch.from_numpy(indices_B)
        if self.device is None:  # NumPy: 0.06 ms a batch between BasicNet's steps, where torch took 0.20
            image_BCHW = self.images_NCHW.take(indices_B, axis=0, mode="wrap")  # at FILLER, -1, some image
            return torch.from_numpy(image_BCHW), torch.from_numpy(self.labels.take(indices_B, mode="wrap")), index_B
        index_B = index_B.to(self.device, non_blocking=True)
        return self.images_on_device.index_select(0, index_B.clamp(min=0)), self.labels_on_device[index_B], index_B


class MemoryLoader(Placed):
    """Batches of images in memory. `pin`: for copying to a GPU while it computes."""

    batch_sampler = None  # Lightning 2.6 looks for it in all that has a sampler

    def __init__(
        self,
        images: InMemory,
        sampler: TrainBatches | EvalBatches,
        *,
        pin: bool = False,
        place: Place | None = None,
    ) -> None:
        self.images, self.sampler, self.pin, self.place = images, sampler, pin, place

    def __len__(self) -> int:
        return len(self.sampler)

    def batches(self) -> Iterator[Batch]:
        """Taken from the images some at a time: what an operation costs by itself is more than the copying."""
        indices = iter(self.sampler)
        for first_B in indices:
            several = [first_B, *itertools.islice(indices, AT_ONCE // (len(first_B) * self.images.image_bytes))]
            parts = (part.split(len(first_B)) for part in self.images.batch(np.concatenate(several)))
            for image_BCHW, label_B, index_B in zip(*parts, strict=True):
                yield (image_BCHW.pin_memory(), label_B, index_B) if self.pin else (image_BCHW, label_B, index_B)


def is_whole_file(array: NDArray[Any]) -> TypeGuard[np.memmap]:
    """A slice of a memory map does not know where in the file it begins."""
    return isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap) and array.flags.c_contiguous


def place_of(array: np.memmap) -> dict[str, Any]:
    """The arguments of np.memmap for the same array."""
    assert array.filename
    return {"filename": array.filename, "dtype": array.dtype, "mode": "r", "offset": array.offset, "shape": array.shape}


class Images(Dataset[Batch]):
    """uint8 images and their labels, indexed by whole batches of indices."""

    def __init__(self, images_NCHW: NDArray[np.uint8], labels_N: NDArray[np.uint8]) -> None:
        self.images_NCHW, self.labels_N = images_NCHW, labels_N

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are spawned: a mapped file by its place, for a memory map is pickled as the bytes that it holds."""
        return {name: place_of(array) if is_whole_file(array) else array for name, array in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name: np.memmap(**a) if isinstance(a, dict) else a for name, a in state.items()})

    def __getitem__(self, indices_B: Indices) -> Batch:
        present = indices_B != FILLER
        places = np.where(present, indices_B, 0)
        labels_B = np.where(present, self.labels_N[places].astype(np.int64), IGNORED)  # in uint8, -100 would be 156
        return torch.from_numpy(self.images_NCHW[places]), torch.from_numpy(labels_B), torch.from_numpy(indices_B)


class WorkerLoader(Placed, DataLoader[Batch]):  # type: ignore[misc]  # torch names its own iterators
    """torch's DataLoader, for images that have to be read or decoded: workers do that while the device computes."""

    def __init__(self, *args: Any, place: Place | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.place = place

    def batches(self) -> Iterator[Batch]:
        return DataLoader.__iter__(self)
