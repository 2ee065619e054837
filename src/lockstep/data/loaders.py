"""Reads the micro-batches of any dataset with any collate function, in this process or in the workers of torch's DataLoader."""

import hashlib
import io
import logging
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, default_convert, get_worker_info

from lockstep.data.dataset import is_pillow, leaves_of
from lockstep.data.keyed import Generators
from lockstep.data.sampler import sample_states
from lockstep.errors import TrainingFailed, UserError, chain

log = logging.getLogger("lockstep")

# --- The values of a batch ---


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


def is_flat(batch: Any) -> bool:
    """Whether a batch is a dict of dense tensors only."""
    values = batch.values() if isinstance(batch, dict) else [None]
    return all(isinstance(value, Tensor) and value.layout == torch.strided for value in values)


def concatenate(values: list[Any]) -> Any:
    """Concatenates the values of several parts of a batch."""
    example = values[0]
    if isinstance(example, Mapping):
        return {name: concatenate([value[name] for value in values]) for name in example}
    if isinstance(example, Tensor):
        if len({value.shape[1:] for value in values}) > 1:
            raise UserError(
                f"samples have several shapes, such as {tuple(example.shape[1:])}. Pad them to one shape, or return a list with one tensor per "
                "sample, which stays a list."
            )
        return torch.cat(values)
    return np.concatenate(values) if isinstance(example, np.ndarray) else sum(values[1:], example)


# --- Batches from worker processes ---

AT_ONCE = 2**22  # bytes gathered at once: BasicNet's bf16 step waited 0.9% of the time, compared to 2.0% with one batch
SHM = Path("/dev/shm")
DEFAULTS = default_collate, default_convert  # torch's collate functions draw no random numbers
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


# --- Micro-batches ---


@dataclass(slots=True)
class MicroBatchInfo:
    """Metadata of a micro-batch. Not a tuple: torch rebuilds tuples when it pins a batch, with lists for ranges."""

    weight: float  # of the loss, so that its mean over micro-batches and processes is the mean over the global batch
    digest: str  # of what this process has read so far, to compare with the other processes; empty if there are none
    samples: float | None  # in this micro-batch of all processes, averaged over the step
    places: range | None = None  # positions of its samples in the epoch
    begin: int = 0  # position in the epoch from which `rows` counts
    keys: list[Any] | None = None  # in an evaluation: the keys passed to its dataset, or the samples of a stream

    @property
    def rows(self) -> range | None:
        """Positions of its samples, as dropout counts them."""
        return self.places and range(self.places.start - self.begin, self.places.stop - self.begin)


class Share(NamedTuple):
    """A micro-batch: the keys passed to the dataset, and what its random numbers are derived from."""

    keys: list[Any]
    place: int  # position of its first sample in the epoch
    number: int  # index among the micro-batches of all processes in the epoch
    seed: int
    epoch: int
    info: MicroBatchInfo


class MicroBatches:
    """Collated samples of a dataset.

    A sample's random numbers are a function of (seed, epoch, place in the epoch), as a sampler may return it twice.
    Those of a collate function are a function of (seed, epoch, micro-batch). A dataset that draws none may say so with
    `draws_random_numbers = False`.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self.dataset, self.collate = dataset, collate
        self.of_samples, self.of_collate = Generators(dataset), Generators(collate)
        self.draws = getattr(dataset, "draws_random_numbers", True)

    def __call__(self, share: Share) -> tuple[Any, MicroBatchInfo]:
        return self.collated(self.samples(share), share), share.info

    def batches(self, shares: Iterator[Share]) -> Iterator[tuple[Any, MicroBatchInfo]]:
        """Reads in this process: several micro-batches of arrays at once, because fixed costs exceed copying."""
        ahead = 1
        while chunk := [*islice(shares, 1 if self.draws else ahead)]:
            if self.draws or len(chunk) == 1:
                try:
                    samples = self.samples(chunk[0])
                    if is_flat(samples):
                        ahead = max(1, AT_ONCE // sum(value.nbytes for value in samples.values()))
                    yield self.collated(samples, chunk[0]), chunk[0].info
                except StopIteration:  # of a dataset: the loader compares its length
                    return
                continue
            values = self.dataset.__getitems__([key for share in chunk for key in share.keys])
            sizes = [len(share.keys) for share in chunk]
            parts = zip(*(tensor.split(sizes) for tensor in values.values()), strict=True)
            for share, part in zip(chunk, parts, strict=True):
                batch = dict(zip(values, part, strict=True))
                yield batch if self.collate in DEFAULTS else self.collated(batch, share), share.info

    def collated(self, samples: Any, share: Share) -> Any:
        if self.collate in DEFAULTS:
            return self.collate(samples)
        if not self.draws and isinstance(samples, Mapping):
            return self.collate(samples)
        fresh = [samples]  # read them again for a second call: the first may have modified them
        states = partial(sample_states, "collate", np.array([share.number]), seed=share.seed, epoch=share.epoch)
        return self.of_collate.each(1, states, lambda _: self.collate(fresh.pop() if fresh else self.samples(share)))[0]

    def samples(self, share: Share) -> Any:
        """Reads samples, one by one if they draw random numbers. `__getitems__` may return a whole batch as a dict."""
        keys, data, rng_kwargs = share.keys, self.dataset, {"seed": share.seed, "epoch": share.epoch}
        get_many = getattr(data, "__getitems__", None) or (lambda keys: [data[key] for key in keys])
        if not self.draws:
            return get_many(keys)
        states = partial(sample_states, "data", share.place + np.arange(len(keys)), **rng_kwargs)
        if not self.of_samples.used:
            (samples,) = self.of_samples.each(1, lambda: states()[:1], lambda _: get_many(keys))
            if not self.of_samples.used:
                return samples
        return concatenate(self.of_samples.each(len(keys), states, lambda i: get_many([keys[i]])))


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
