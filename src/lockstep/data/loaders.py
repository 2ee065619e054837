"""Loads batches in a sampler's order, from arrays in memory or with the worker processes of torch's DataLoader."""

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

from lockstep.data.dataset import Arrays, Batch, Items, is_pillow, leaves_of, samples_of
from lockstep.data.keyed import Generators
from lockstep.data.sampler import FILLER, Indices, Sampler, sample_states
from lockstep.errors import TrainingFailed, UserError, chain

log = logging.getLogger("lockstep")

# --- Reads a batch of samples by index ---


def as_tensor(value: Any, name: str = "value") -> Any:
    """Converts numbers to a tensor. Leaves texts, and lists with a tensor or image per sample (boxes), unchanged."""
    is_list_of_samples = isinstance(value, list) and any(isinstance(item, Tensor) or is_pillow(item) for item in value)
    if is_list_of_samples or isinstance(value, Tensor):
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        if not all(isinstance(item, int | float | np.number | np.ndarray) for item in leaves_of(value)):
            return value
        sizes = [getattr(item, "shape", None) or (len(item) if hasattr(item, "__len__") else 1) for item in value[:4]]
        raise UserError(
            f"the shape of `{name}` differs between samples: the first ones have {', '.join(map(str, sizes))}. Pad them to "
            "one shape, or return a list with one tensor per sample, which stays a list."
        ) from None
    return torch.as_tensor(array) if is_numeric(array) else value.tolist() if isinstance(value, np.ndarray) else value


def is_numeric(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.kind in "biufc"


class Reader:
    """Reads batches of a part and transforms them with `at_reading`, which draws random numbers.

    A torch Dataset may draw them too: its random numbers are a function of (seed, epoch, sample, copy). `repeats`
    consecutive indices are copies of one sample.
    """

    def __init__(
        self, part: Any, *, seed: int, repeats: int = 1, at_reading: Callable[..., Batch] | None = None, apart: bool = False
    ) -> None:  # fmt: skip
        self.samples, self.seed, self.repeats, self.at_reading = samples_of(part), seed, repeats, at_reading
        self.apart = apart  # transforms each sample before reading the next; `at_reading` makes their shapes equal
        self.generators = Generators(getattr(self.samples, "dataset", None))

    def __call__(self, indices_B: Indices, epoch: int = 0) -> Batch:
        """Reads a batch. The first sample of the part replaces each FILLER."""
        if not self.apart or len(indices_B) == self.repeats:
            return self.read(indices_B, epoch)
        starts = range(0, len(indices_B), self.repeats)
        samples = [self.read(indices_B[start : start + self.repeats], epoch) for start in starts]
        return {name: concatenate([sample[name] for sample in samples]) for name in samples[0]}

    def read(self, indices_B: Indices, epoch: int) -> Batch:
        rng_kwargs = {"seed": self.seed, "epoch": epoch, "repeats": self.repeats}
        values = {name: as_tensor(value, name) for name, value in self[np.maximum(indices_B, 0), epoch].items()}
        batch = {**values, "index": torch.from_numpy(indices_B), "count": int((indices_B != FILLER).sum())}
        return self.at_reading(batch, index_B=indices_B, **rng_kwargs) if self.at_reading else batch

    def __getitem__(self, key: tuple[Indices, int]) -> Mapping[str, Any]:
        """Reads samples, without `at_reading`. Copies of a sample are read once, unless the data set draws numbers."""
        (indices_B, epoch), repeats, items = key, self.repeats, self.samples
        if not isinstance(items, Items):
            return items[indices_B] if repeats == 1 else repeat_samples(items[indices_B[::repeats]], repeats)  # type: ignore[no-any-return]

        def read(index_N: Indices, copies: int) -> list[Any]:
            states = partial(sample_states, "data", index_N, seed=self.seed, epoch=epoch, repeats=copies)
            return self.generators.each(len(index_N), states, lambda i: items.one(index_N[i]))

        rows = read(indices_B[::repeats], 1)
        draws = repeats > 1 and self.generators.used
        return items.collate(read(indices_B, repeats) if draws else [row for row in rows for _ in range(repeats)])


def concatenate(values: list[Any]) -> Any:
    """Concatenates the values of several parts of a batch."""
    example = values[0]
    if isinstance(example, Mapping):
        return {name: concatenate([value[name] for value in values]) for name in example}
    if isinstance(example, Tensor):
        return torch.cat(values)
    return np.concatenate(values) if isinstance(example, np.ndarray) else sum(values[1:], example)


def repeat_samples(value: Any, times: int) -> Any:
    """Repeats the values of each sample `times` times in a row."""
    if isinstance(value, Mapping):
        return {name: repeat_samples(item, times) for name, item in value.items()}
    if isinstance(value, list):
        return [item for item in value for _ in range(times)]
    return value.repeat_interleave(times, 0) if isinstance(value, Tensor) else np.repeat(value, times, 0)


# --- Batches of arrays in memory ---

AT_ONCE = 2**22  # bytes gathered at once: BasicNet's bf16 step waited 0.9% of the time, compared to 2.0% with one batch


class InMemory:
    """Arrays on a device. If it is None, they stay where they are: all processes share a mapped file."""

    def __init__(self, arrays: Arrays, device: torch.device | None) -> None:
        self.arrays, self.device = arrays, device
        self.sample_bytes = max(1, arrays.nbytes // max(1, len(arrays)))
        self.on_device: dict[str, Tensor] = {}
        if device is not None:
            with warnings.catch_warnings():  # it is never written to
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                self.on_device = {n: torch.from_numpy(np.asarray(a)).to(device) for n, a in arrays.arrays.items()}

    def gather(self, indices_N: Indices) -> dict[str, Tensor]:
        """The samples at `indices_N`; an arbitrary sample replaces a filler."""
        if self.device is None:  # NumPy takes 0.06 ms per batch between BasicNet's steps, torch 0.20 ms
            return {name: torch.from_numpy(a) for name, a in self.arrays[indices_N].items()}
        device_indices_N = torch.from_numpy(indices_N).to(self.device, non_blocking=True).clamp(min=0)
        return {name: a.index_select(0, device_indices_N) for name, a in self.on_device.items()}

    def batches(self, sampler: Sampler, *, pin: bool = False) -> Iterator[Batch]:
        """Gathers several batches at once: fixed costs exceed copying. `pin`: for asynchronous copies to a GPU."""
        indices = iter(sampler)
        for first_B in indices:
            chunk = [first_B, *itertools.islice(indices, AT_ONCE // (len(first_B) * self.sample_bytes))]
            values = self.gather(np.concatenate(chunk))
            parts = zip(*(tensor.split([*map(len, chunk)]) for tensor in values.values()), strict=True)
            for part, indices_B in zip(parts, chunk, strict=True):
                # The indices stay on the host, where augmentation draws random numbers.
                batch: Batch = {**dict(zip(values, part, strict=True)), "index": torch.from_numpy(indices_B)}
                if pin:
                    batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
                yield {**batch, "count": int((indices_B != FILLER).sum())}


# --- Batches from worker processes ---

SHM = Path("/dev/shm")
SHARED = 2**22  # with less free space, batches are pickled: workers need semaphores there to start


def dead_worker_advice(error: BaseException) -> str | None:
    """Advice if the error reports a worker that died; None otherwise. torch reports it from the main process."""
    messages = [str(exception) for exception in chain(error) if isinstance(exception, RuntimeError)]
    if not (reports := [message for message in messages if message.startswith("DataLoader worker (pid")]):
        return None
    # the first error in the chain names the signal
    memory = " Memory probably ran out." if "signal: Killed" in reports[-1] else ""
    return (
        f"{reports[-1].rstrip('. ')}.{memory} Try a smaller loader.num_workers, or loader.num_workers=0 to load data in the main process. A "
        "training run continues from its last checkpoint with resume=auto."
    )


class WithEpoch:
    """The batches of a sampler, each with its epoch: workers have no other way to get it."""

    def __init__(self, sampler: Iterable[Indices]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[tuple[Indices, int]]:
        for indices_B in self.sampler:
            yield indices_B, getattr(self.sampler, "epoch", 0)


class SharedMemoryTransport:
    """Passes batches from a worker with tensors in shared memory, or pickled through a pipe if /dev/shm is full.

    torch would share them in a thread of the worker. If that fails, it loses the batch and waits for it forever.
    """

    def __init__(self) -> None:
        self.shares = not SHM.is_dir() or shutil.disk_usage(SHM).free >= SHARED

    def packed(self, batch: Any) -> Any:
        if get_worker_info() is None:
            return batch
        if self.shares:
            try:
                for value in leaves_of(batch):
                    if isinstance(value, Tensor):
                        value.share_memory_()
                return batch
            except RuntimeError:
                self.shares = False  # do not retry: each failure leaves a name in /dev/shm
        return pickle.dumps(batch)


class Indexed(SharedMemoryTransport, Dataset[Any]):
    """A torch Dataset of batches, indexed by the arguments of `read`."""

    def __init__(self, read: Callable[..., Any]) -> None:
        super().__init__()
        self.read = read

    @property
    def dataset(self) -> Any:
        return getattr(self.read, "dataset", None)

    def __getitem__(self, arguments: tuple[Any, ...]) -> Any:
        return self.packed(self.read(*arguments))


def identity(batch: Any) -> Any:
    return batch


class FromWorkers:
    """Batches that workers read or decode while the device computes. Without workers, this process reads them."""

    warned = False

    def __init__(self, data: Dataset[Any], **options: Any) -> None:
        self.loader = DataLoader(data, batch_size=None, collate_fn=identity, **options)  # `data` returns whole batches

    def batches(self) -> Iterator[Any]:
        try:
            batches = iter(self.loader)
        except OSError as e:
            raise TrainingFailed(
                f"{self.loader.num_workers} loader workers could not be started: {e.strerror}. They need space in /dev/shm and open "
                "files (ulimit -n). Raise these limits, or set a smaller loader.num_workers, or loader.num_workers=0."
            ) from None
        for batch in batches:
            if isinstance(batch, bytes) and not self.warned:
                self.warned = True
                log.warning(
                    "/dev/shm has too little free space for the batches of %s workers, which use slower pipes instead. Enlarge it "
                    "(docker run --shm-size=8g), or set a smaller loader.num_workers.",
                    self.loader.num_workers,
                )
            yield pickle.loads(batch) if isinstance(batch, bytes) else batch


# --- Digests that processes compare ---


class Content(pickle.Pickler):
    """Pickles equal objects to equal bytes: ignores which parts are the same object, and where tensors are stored."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            plain = value.detach().cpu().contiguous()
            return bytes, (
                f"{plain.dtype} {plain.shape}".encode() + plain.reshape(-1).view(torch.uint8).numpy().tobytes(),
            )
        return NotImplemented


def digest_of(value: Any, previous: str = "") -> str:
    """Digest of a value and the digest before it. Equal in processes with equal values. Raises what pickle raises."""
    stored = io.BytesIO()
    pickler = Content(stored, protocol=5)
    pickler.fast = True  # no memo of the objects it has pickled
    pickler.dump(value)
    return hashlib.blake2b(previous.encode() + stored.getbuffer(), digest_size=16).hexdigest()


# --- Micro-batches of any dataset with any collate function, for data/standard.py ---


@dataclass(frozen=True)
class MicroBatchInfo:
    """Metadata of a micro-batch. Not a tuple: torch rebuilds tuples when it pins a batch, with lists for ranges."""

    weight: float  # of the loss, so that its mean over micro-batches and processes is the mean over the global batch
    digest: str  # of what this process has read so far, to compare with the other processes; empty if there are none
    samples: float | None  # in this micro-batch of all processes, averaged over the step
    places: range | None = None  # positions of its samples in the epoch
    keys: list[Any] | None = None  # in an evaluation: the keys passed to its dataset, or the samples of a stream


class Share(NamedTuple):
    """A micro-batch: the keys passed to the dataset, and what its random numbers are derived from."""

    keys: list[Any]
    place: int  # position of its first sample in the epoch
    number: int  # index among the micro-batches of all processes in the epoch
    seed: int
    epoch: int
    info: MicroBatchInfo


class MicroBatches:
    """Collated samples of a user's dataset.

    A sample's random numbers are a function of (seed, epoch, position in the epoch), as a sampler may return it twice.
    Those of a collate function are a function of (seed, epoch, micro-batch).
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate
        self.of_samples, self.of_collate = Generators(dataset), Generators(collate)

    def __call__(self, share: Share) -> tuple[Any, MicroBatchInfo]:
        return self.collated(self.samples(share), share), share.info

    def collated(self, samples: list[Any], share: Share) -> Any:
        if self.collate is default_collate:
            return default_collate(samples)
        fresh = [samples]  # read them again for a second call: the first may have modified them
        states = partial(sample_states, "collate", np.array([share.number]), seed=share.seed, epoch=share.epoch)
        return self.of_collate.each(1, states, lambda _: self.collate(fresh.pop() if fresh else self.samples(share)))[0]

    def samples(self, share: Share) -> list[Any]:
        """Reads samples, one by one if they draw random numbers."""
        keys, data, rng_kwargs = share.keys, self.dataset, {"seed": share.seed, "epoch": share.epoch}
        states = partial(sample_states, "data", share.place + np.arange(len(keys)), **rng_kwargs)
        get_many = getattr(data, "__getitems__", None)
        if get_many and not self.of_samples.used:
            (batch,) = self.of_samples.each(1, lambda: states()[:1], lambda _: get_many(keys))
            if not self.of_samples.used:
                return batch  # type: ignore[no-any-return]
        return self.of_samples.each(len(keys), states, lambda i: get_many([keys[i]])[0] if get_many else data[keys[i]])


class OfStream(MicroBatches):
    """Collated samples of a stream. They cannot be reread, so the collate function is seeded from the first call on."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        super().__init__(None, collate)
        self.of_collate.used = {*range(len(self.of_collate.all))}

    def samples(self, share: Share) -> list[Any]:
        return share.keys


def begin_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Calls the user's worker_init_fn with the user's dataset in the worker info."""
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]  # torch 2.11 forbids `=`
    if init is not None:
        torch.manual_seed(info.seed - worker)  # `init` may keep the seed: the samples must not depend on the worker
        init(worker)


# --- The loader that the Trainer receives ---


def timed(batches: Iterator[Any], waited: Callable[[float], None]) -> Iterator[Any]:
    """Yields the batches; calls `waited` with the seconds that each one took."""
    end = object()
    while True:
        began_s = time.perf_counter()
        batch = next(batches, end)
        waited(time.perf_counter() - began_s)
        if batch is end:
            return
        yield batch


class ResumableLoader:
    """Starts loading only when the first batch is requested.

    Lightning creates the iterator before it restores a checkpoint and sets the epoch; workers would then fetch batches
    of epoch 0. The Trainer saves the position in checkpoints, so the loader has no state. It is not a DataLoader: for
    predictions, Lightning would replace its sampler.
    """

    batch_sampler = None  # Lightning 2.6 expects it on any object with a sampler

    def __init__(self, batches: Callable[[], Iterator[Batch]], sampler: Sampler) -> None:
        self.batches, self.sampler = batches, sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load. Both methods must exist for Lightning to resume within an epoch."""
