"""Two kinds of loaders: indexing arrays in memory, or torch's DataLoader with workers."""

import itertools
import logging
import math
import re
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lockstep.config.words import size
from lockstep.data.dataset import Arrays, Batch, Indices, Samples
from lockstep.data.sampler import FILLER, Sampler
from lockstep.errors import TrainingFailed, chain

# --- Explains how processes that load data ended, which torch reports from the main process ---

LOST = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([^.]+)\.|exited unexpectedly(?: with exit code (\d+))?)"
)
SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}
WHY = {
    signal.SIGKILL: ", which usually means that memory ran out",
    signal.SIGBUS: ": there was no room in /dev/shm, through which batches are passed",
}
ADVICE = (
    "Try fewer data.num_workers, or data.num_workers=0 to load data in the main process. "
    "A training run continues from its last checkpoint with resume=auto."
)


def lost(error: BaseException) -> str | None:
    """How a worker ended, if that is what the error says."""
    found = [match for each in chain(error) if isinstance(each, RuntimeError) and (match := LOST.search(str(each)))]
    if not found:
        return None
    pids, by, code = max((match.groups() for match in found), key=lambda groups: sum(map(bool, groups)))
    how = f"ended with exit code {code}" if code else "ended"
    if number := SIGNALS.get(by):
        how = f"was ended by {signal.Signals(number).name}{WHY.get(number, '')}"
    return f"a process that loads data (pid {pids}) {how}. {ADVICE}"


# --- Two kinds of loaders: indexing arrays in memory, or torch's DataLoader with workers ---

SHM = Path("/dev/shm")
SHARED = 2**22  # less room is left to semaphores, without which no worker starts
log = logging.getLogger("lockstep")
AT_ONCE = 2**22  # bytes gathered at once: BasicNet's bf16 step waited 0.9 % of its time, against 2.0 % with one batch


@dataclass
class Place:
    """The position of training, and how long it has waited for batches."""

    position: Callable[[], int]  # micro-batches done in the epoch
    waited_s: float = 0.0


class Placed:
    """A loader that starts at `place`, and only when its first batch is requested.

    Lightning creates the iterator before it restores a checkpoint and sets the epoch, when workers would fetch batches of
    epoch 0. The position comes from the Trainer, which saves it in checkpoints, so the loader has no state.
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
        """Nothing to load. Having both methods tells Lightning that resuming within an epoch is supported."""


def as_tensor(value: Any) -> Any:
    """Numbers as a tensor; texts, and lists of a tensor per sample, such as boxes, as they are."""
    if isinstance(value, Tensor) or (isinstance(value, list) and any(isinstance(each, Tensor) for each in value)):
        return value
    array = np.asarray(value)
    return torch.as_tensor(array) if array.dtype.kind in "biufc" else value


def fetch(samples: Samples, indices_B: Indices) -> Batch:
    """The batch of the samples at `indices_B`; some sample takes the place of each FILLER."""
    places_B = np.where(indices_B == FILLER, 0, indices_B)
    batch: Batch = {name: as_tensor(value) for name, value in samples[places_B].items()}
    return complete(batch, torch.from_numpy(indices_B), indices_B)


def complete(batch: Batch, index_B: Tensor, indices_B: Indices) -> Batch:
    return {**batch, "index": index_B, "count": int((indices_B != FILLER).sum())}


def pinned(batch: Batch) -> Batch:
    return {name: value.pin_memory() if isinstance(value, Tensor) else value for name, value in batch.items()}


class InMemory:
    """Arrays on a device; with None they stay where they are, as a mapped file is shared by all processes."""

    def __init__(self, arrays: Arrays, device: torch.device | None) -> None:
        self.arrays, self.device, self.sample_bytes = arrays, device, max(1, arrays.sample_bytes)
        self.on_device: dict[str, Tensor] = {}
        if device is not None:
            with warnings.catch_warnings():  # it is never written to
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                self.on_device = {n: torch.from_numpy(np.asarray(a)).to(device) for n, a in arrays.arrays.items()}

    def batch(self, indices_B: Indices) -> dict[str, Tensor]:
        """The batch with its `index`; some sample takes the place of a filler."""
        index_B = torch.from_numpy(indices_B)
        if self.device is None:  # NumPy takes 0.06 ms a batch between BasicNet's steps, torch 0.20
            return {name: torch.from_numpy(a) for name, a in self.arrays[indices_B].items()} | {"index": index_B}
        index_B = index_B.to(self.device, non_blocking=True)
        places_B = index_B.clamp(min=0)
        return {name: a.index_select(0, places_B) for name, a in self.on_device.items()} | {"index": index_B}


class MemoryLoader(Placed):
    """Batches of arrays in memory. `pin`: for copying to a GPU while it computes."""

    batch_sampler = None  # Lightning 2.6 expects it of everything with a sampler

    def __init__(self, data: InMemory, sampler: Sampler, *, pin: bool = False, place: Place | None = None) -> None:
        self.data, self.sampler, self.pin, self.place = data, sampler, pin, place

    def __len__(self) -> int:
        return len(self.sampler)

    def batches(self) -> Iterator[Batch]:
        """Gathers several batches at a time: an operation's fixed cost exceeds that of copying."""
        indices = iter(self.sampler)
        for first_B in indices:
            several = [first_B, *itertools.islice(indices, AT_ONCE // (len(first_B) * self.data.sample_bytes))]
            taken = self.data.batch(np.concatenate(several))
            sizes = [len(indices_B) for indices_B in several]
            parts = zip(*(tensor.split(sizes) for tensor in taken.values()), strict=True)
            for part, indices_B in zip(parts, several, strict=True):
                named = dict(zip(taken, part, strict=True))
                batch = complete(named, torch.from_numpy(indices_B), indices_B)  # on the host, where augmentation draws
                yield pinned(batch) if self.pin else batch


def shared_room() -> float:
    """Free bytes of shared memory, where it is a file system."""
    return shutil.disk_usage(SHM).free if SHM.is_dir() else math.inf


def warn_of_small_shared_memory() -> None:
    """For dataloaders of the user's own, whose batches torch loses there (see `Indexed.passable`)."""
    if shared_room() < SHARED:
        log.warning(
            "%s has only %s free. Worker processes pass batches through it, and a run waits for ever for a batch that does not fit. "
            "Enlarge it (docker run --shm-size=1g), or give your dataloaders num_workers=0.",
            SHM,
            size(shared_room()),
        )


def unchanged(batch: Batch) -> Batch:
    """In place of torch's default, which makes tensors of arrays."""
    return batch


class Indexed(Dataset[Batch]):
    """Samples as a torch Dataset that is indexed by whole batches of indices."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.shares = samples, shared_room() >= SHARED

    def __getitem__(self, indices_B: Indices) -> Batch:
        batch = fetch(self.samples, indices_B)
        return batch if get_worker_info() is None else self.passable(batch)

    def passable(self, batch: Batch) -> Batch:
        """Tensors in shared memory; or arrays, which a pipe takes, if /dev/shm has no room.

        torch would share them in a thread of the worker, lose the batch when that fails, and wait for it for ever.
        """
        if self.shares:
            try:
                return {name: v.share_memory_() if isinstance(v, Tensor) else v for name, v in batch.items()}
            except RuntimeError:
                self.shares = False  # each failure leaves a name in /dev/shm
        return {name: v.numpy() if isinstance(v, Tensor) else v for name, v in batch.items()}


class WorkerLoader(Placed, DataLoader[Batch]):  # type: ignore[misc]  # torch declares its own iterator types
    """torch's DataLoader, for samples that workers read or decode while the device computes."""

    warned = False

    def __init__(self, *args: Any, place: Place | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "collate_fn": unchanged})
        self.place = place

    def batches(self) -> Iterator[Batch]:
        try:
            loaded = DataLoader.__iter__(self)
        except OSError as e:
            raise TrainingFailed(
                f"{self.num_workers} processes that load data could not be started: {e.strerror}. They need room in /dev/shm and open "
                "files (ulimit -n). Make these larger, or type fewer data.num_workers, or data.num_workers=0."
            ) from None
        for batch in loaded:
            if self.num_workers and isinstance(batch["index"], np.ndarray):
                if not self.warned:
                    self.warned = True
                    log.warning(
                        "/dev/shm has no room for the batches of %s workers, which pass them through pipes instead: slower. Make it larger "
                        "(docker run --shm-size=8g), or type fewer data.num_workers.",
                        self.num_workers,
                    )
                batch = {name: as_tensor(v) if isinstance(v, np.ndarray) else v for name, v in batch.items()}
            yield batch


class Unchanged:
    """A loader that Lightning leaves as it is: for predictions, it makes every DataLoader anew, with a sampler of its own."""

    batch_sampler = None

    def __init__(self, loader: MemoryLoader | WorkerLoader) -> None:
        self.loader, self.sampler = loader, loader.sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader)
