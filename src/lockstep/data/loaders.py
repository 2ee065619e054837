"""Loads batches in a sampler's order: from arrays in memory, or with the worker processes of torch's DataLoader."""

import hashlib
import io
import itertools
import logging
import pickle
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from lockstep.data.dataset import Arrays, Batch, Indices, Items, flat, is_pillow, samples_of
from lockstep.data.keyed import Generators
from lockstep.data.sampler import FILLER, Sampler, sample_states
from lockstep.errors import TrainingFailed, UserError, chain

log = logging.getLogger("lockstep")

# --- A batch of samples by their indices ---


def as_tensor(value: Any, name: str = "value") -> Any:
    """Numbers as a tensor; texts, and lists of a tensor or an image per sample, such as boxes, as they are."""
    apart = isinstance(value, list) and any(isinstance(each, Tensor) or is_pillow(each) for each in value)
    if apart or isinstance(value, Tensor):
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        if not all(isinstance(each, int | float | np.number | np.ndarray) for each in flat(value)):
            return value
        sizes = [getattr(each, "shape", None) or (len(each) if hasattr(each, "__len__") else 1) for each in value[:4]]
        raise UserError(
            f"the data set returns `{name}` as numbers of several shapes: the first samples have {', '.join(map(str, sizes))}. Pad them to "
            "one shape, or return a list with a tensor for each sample, which stays a list."
        ) from None
    return torch.as_tensor(array) if is_numeric(array) else value.tolist() if isinstance(value, np.ndarray) else value


def is_numeric(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.kind in "biufc"


class Reader:
    """Reads batches of a part and changes them by `at_reading`, which draws random numbers.

    So may a torch Dataset: all numbers that it draws are a function of (seed, epoch, sample, copy). `repeats` indices in a row are copies.
    """

    def __init__(
        self, part: Any, *, seed: int, repeats: int = 1, at_reading: Callable[..., Batch] | None = None, apart: bool = False
    ) -> None:  # fmt: skip
        self.samples, self.seed, self.repeats, self.at_reading = samples_of(part), seed, repeats, at_reading
        self.apart = apart  # `at_reading` changes each sample before the next is read, and makes them equal in shape
        self.generators = Generators(getattr(self.samples, "dataset", None))

    def __call__(self, indices_B: Indices, epoch: int = 0) -> Batch:
        """The first sample takes the place of each FILLER."""
        if not self.apart or len(indices_B) == self.repeats:
            return self.read(indices_B, epoch)
        places = range(0, len(indices_B), self.repeats)
        samples = [self.read(indices_B[place : place + self.repeats], epoch) for place in places]
        return {name: together([sample[name] for sample in samples]) for name in samples[0]}

    def read(self, indices_B: Indices, epoch: int) -> Batch:
        of_step = {"seed": self.seed, "epoch": epoch, "repeats": self.repeats}
        named = {name: as_tensor(value, name) for name, value in self[np.maximum(indices_B, 0), epoch].items()}
        batch = {**named, "index": torch.from_numpy(indices_B), "count": int((indices_B != FILLER).sum())}
        return self.at_reading(batch, index_B=indices_B, **of_step) if self.at_reading else batch

    def __getitem__(self, place: tuple[Indices, int]) -> Mapping[str, Any]:
        """Samples without `at_reading`. Copies of a sample are read once, unless its data set draws."""
        (indices_B, epoch), repeats, items = place, self.repeats, self.samples
        if not isinstance(items, Items):
            return items[indices_B] if repeats == 1 else repeated(items[indices_B[::repeats]], repeats)  # type: ignore[no-any-return]

        def read(index_N: Indices, copies: int) -> list[Any]:
            states = partial(sample_states, "data", index_N, seed=self.seed, epoch=epoch, repeats=copies)
            return self.generators.each(len(index_N), states, lambda place: items.one(index_N[place]))

        samples = read(indices_B[::repeats], 1)
        draws = repeats > 1 and self.generators.used
        return items.together(read(indices_B, repeats) if draws else [each for each in samples for _ in range(repeats)])


def together(values: list[Any]) -> Any:
    """What parts of a batch hold, as what the batch holds."""
    first = values[0]
    if isinstance(first, Mapping):
        return {name: together([value[name] for value in values]) for name in first}
    if isinstance(first, Tensor):
        return torch.cat(values)
    return np.concatenate(values) if isinstance(first, np.ndarray) else sum(values[1:], first)


def repeated(value: Any, times: int) -> Any:
    """The values of each sample `times` times in a row."""
    if isinstance(value, Mapping):
        return {name: repeated(each, times) for name, each in value.items()}
    if isinstance(value, list):
        return [each for each in value for _ in range(times)]
    return value.repeat_interleave(times, 0) if isinstance(value, Tensor) else np.repeat(value, times, 0)


# --- Batches of arrays in memory ---

AT_ONCE = 2**22  # bytes gathered at once: BasicNet's bf16 step waited 0.9% of its time, against 2.0% with one batch


class InMemory:
    """Arrays on a device; with None they stay where they are, as a mapped file is shared by all processes."""

    def __init__(self, arrays: Arrays, device: torch.device | None) -> None:
        self.arrays, self.device = arrays, device
        self.sample_bytes = max(1, arrays.nbytes // max(1, len(arrays)))
        self.on_device: dict[str, Tensor] = {}
        if device is not None:
            with warnings.catch_warnings():  # it is never written to
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                self.on_device = {n: torch.from_numpy(np.asarray(a)).to(device) for n, a in arrays.arrays.items()}

    def gather(self, indices_N: Indices) -> dict[str, Tensor]:
        """The samples at `indices_N`; some sample takes the place of a filler."""
        if self.device is None:  # NumPy takes 0.06 ms a batch between BasicNet's steps, torch 0.20
            return {name: torch.from_numpy(a) for name, a in self.arrays[indices_N].items()}
        places_N = torch.from_numpy(indices_N).to(self.device, non_blocking=True).clamp(min=0)
        return {name: a.index_select(0, places_N) for name, a in self.on_device.items()}

    def batches(self, sampler: Sampler, *, pin: bool = False) -> Iterator[Batch]:
        """Takes several batches at a time: an operation's fixed cost exceeds that of copying. `pin`: to copy to a GPU while it computes."""
        indices = iter(sampler)
        for first_B in indices:
            several = [first_B, *itertools.islice(indices, AT_ONCE // (len(first_B) * self.sample_bytes))]
            values = self.gather(np.concatenate(several))
            parts = zip(*(tensor.split([*map(len, several)]) for tensor in values.values()), strict=True)
            for part, indices_B in zip(parts, several, strict=True):
                # The indices stay on the host, where augmentation draws its numbers.
                batch: Batch = {**dict(zip(values, part, strict=True)), "index": torch.from_numpy(indices_B)}
                if pin:
                    batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
                yield {**batch, "count": int((indices_B != FILLER).sum())}


# --- Batches that worker processes load ---

SHM = Path("/dev/shm")
SHARED = 2**22  # less room is left to semaphores, without which no worker starts


def lost(error: BaseException) -> str | None:
    """What to do about a worker that ended, if that is what the error says. torch reports it from the main process."""
    messages = [str(each) for each in chain(error) if isinstance(each, RuntimeError)]
    if not (of_worker := [message for message in messages if message.startswith("DataLoader worker (pid")]):
        return None
    # the first error names the signal
    memory = " Memory probably ran out." if "signal: Killed" in of_worker[-1] else ""
    return (
        f"{of_worker[-1].rstrip('. ')}.{memory} Try fewer loader.num_workers, or loader.num_workers=0 to load data in the main process. A "
        "training run continues from its last checkpoint with resume=auto."
    )


class Places:
    """The batches of a sampler, each with its epoch, which workers are not told otherwise."""

    def __init__(self, sampler: Iterable[Indices]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[tuple[Indices, int]]:
        for indices_B in self.sampler:
            yield indices_B, getattr(self.sampler, "epoch", 0)


class Packs:
    """Passes batches from a worker with their tensors in shared memory; or pickled, for which a pipe has room, if /dev/shm has none.

    torch would share them in a thread of the worker, lose the batch when that fails, and wait for it for ever.
    """

    def __init__(self) -> None:
        self.shares = not SHM.is_dir() or shutil.disk_usage(SHM).free >= SHARED

    def packed(self, batch: Any) -> Any:
        if get_worker_info() is None:
            return batch
        if self.shares:
            try:
                for value in flat(batch):
                    if isinstance(value, Tensor):
                        value.share_memory_()
                return batch
            except RuntimeError:
                self.shares = False  # each failure leaves a name in /dev/shm
        return pickle.dumps(batch)


class Indexed(Packs, Dataset[Any]):
    """A torch Dataset of batches, by the arguments of what reads them."""

    def __init__(self, read: Callable[..., Any]) -> None:
        super().__init__()
        self.read = read

    @property
    def dataset(self) -> Any:
        return getattr(self.read, "dataset", None)

    def __getitem__(self, arguments: tuple[Any, ...]) -> Any:
        return self.packed(self.read(*arguments))


def as_it_is(batch: Any) -> Any:
    return batch


class FromWorkers:
    """Batches that workers read or decode while the device computes; without workers, this process does."""

    warned = False

    def __init__(self, data: Dataset[Any], **options: Any) -> None:
        self.loader = DataLoader(data, batch_size=None, collate_fn=as_it_is, **options)  # `data` gives whole batches

    def batches(self) -> Iterator[Any]:
        try:
            batches = iter(self.loader)
        except OSError as e:
            raise TrainingFailed(
                f"{self.loader.num_workers} processes that load data could not be started: {e.strerror}. They need room in /dev/shm and open "
                "files (ulimit -n). Raise these limits, or set fewer loader.num_workers, or loader.num_workers=0."
            ) from None
        for batch in batches:
            if isinstance(batch, bytes) and not self.warned:
                self.warned = True
                log.warning(
                    "/dev/shm has no room for the batches of %s workers, which pass them through pipes instead: slower. Enlarge it "
                    "(docker run --shm-size=8g), or set fewer loader.num_workers.",
                    self.loader.num_workers,
                )
            yield pickle.loads(batch) if isinstance(batch, bytes) else batch


# --- What processes compare ---


class Content(pickle.Pickler):
    """Without what differs between equal objects: which of their parts are one object, and where tensors are stored."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            plain = value.detach().cpu().contiguous()
            return bytes, (
                f"{plain.dtype} {plain.shape}".encode() + plain.reshape(-1).view(torch.uint8).numpy().tobytes(),
            )
        return NotImplemented


def digest_of(value: Any, before: str = "") -> str:
    """Of what was digested before, and a value: the same in processes that have the same ones. Raises what pickle raises."""
    stored = io.BytesIO()
    pickler = Content(stored, protocol=5)
    pickler.fast = True  # does not note which objects it has seen
    pickler.dump(value)
    return hashlib.blake2b(before.encode() + stored.getbuffer(), digest_size=16).hexdigest()


# --- Micro-batches of any dataset, by any collate function: data/standard.py ---


@dataclass(frozen=True)
class Told:
    """What is known of a micro-batch. No tuple: where batches are pinned, torch rebuilds tuples, with lists in place of ranges."""

    weight: float  # of its loss, so the average over micro-batches and processes is that over the global batch
    digest: str  # of what the process has read so far, to be compared with those of the others; empty if there are none
    samples: float | None  # of all processes in this micro-batch, on average over the step's
    places: range | None = None  # of its samples in the epoch
    keys: list[Any] | None = None  # of an evaluation: what its dataset was asked for, or what a stream gave


class Share(NamedTuple):
    """A micro-batch: what the dataset is asked for, and what its random numbers follow from."""

    keys: list[Any]
    place: int  # of its first sample in the epoch
    number: int  # among the micro-batches of all processes in the epoch
    seed: int
    epoch: int
    told: Told


class MicroBatches:
    """Collated samples of a user's dataset.

    Random numbers of a sample are a function of (seed, epoch, place of the sample in the epoch), because a sampler may give a sample
    twice. Those of a collate function follow from (seed, epoch, micro-batch).
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate
        self.of_samples, self.of_collate = Generators(dataset), Generators(collate)

    def __call__(self, share: Share) -> tuple[Any, Told]:
        return self.collated(self.samples(share), share), share.told

    def collated(self, samples: list[Any], share: Share) -> Any:
        if self.collate is default_collate:
            return default_collate(samples)
        kept = [samples]  # one that has changed its samples cannot have them again
        states = partial(sample_states, "collate", np.array([share.number]), seed=share.seed, epoch=share.epoch)
        return self.of_collate.each(1, states, lambda _: self.collate(kept.pop() if kept else self.samples(share)))[0]

    def samples(self, share: Share) -> list[Any]:
        """One by one if they draw random numbers."""
        keys, data, of_epoch = share.keys, self.dataset, {"seed": share.seed, "epoch": share.epoch}
        states = partial(sample_states, "data", share.place + np.arange(len(keys)), **of_epoch)
        several = getattr(data, "__getitems__", None)
        if several and not self.of_samples.used:
            (found,) = self.of_samples.each(1, lambda: states()[:1], lambda _: several(keys))
            if not self.of_samples.used:
                return found  # type: ignore[no-any-return]
        return self.of_samples.each(len(keys), states, lambda i: several([keys[i]])[0] if several else data[keys[i]])


class OfStream(MicroBatches):
    """Collated samples that a stream gave, which cannot be read again: a collate function is seeded from the first time on."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        super().__init__(None, collate)
        self.of_collate.used = {*range(len(self.of_collate.all))}

    def samples(self, share: Share) -> list[Any]:
        return share.keys


def begin_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Shows the user's own dataset to the user's own function."""
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]  # torch 2.11 forbids an assignment
    if init is not None:
        init(worker)


# --- The loader that the Trainer gets ---


def timed(batches: Iterator[Any], waited: Callable[[float], None]) -> Iterator[Any]:
    """The batches; `waited` gets the seconds that each one takes."""
    ended = object()
    while True:
        began_s = time.perf_counter()
        batch = next(batches, ended)
        waited(time.perf_counter() - began_s)
        if batch is ended:
            return
        yield batch


class ResumableLoader:
    """Batches that are made when the first one is requested.

    Lightning creates the iterator before it restores a checkpoint and sets the epoch, when workers would fetch batches of
    epoch 0. The position comes from the Trainer, which saves it in checkpoints, so the loader has no state. It is no
    DataLoader, which Lightning would replace for predictions by one with a sampler of its own.
    """

    batch_sampler = None  # Lightning 2.6 expects it of everything with a sampler

    def __init__(self, batches: Callable[[], Iterator[Batch]], sampler: Sampler) -> None:
        self.batches, self.sampler = batches, sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load. Having both methods tells Lightning that resuming within an epoch is supported."""
