"""Wraps users' DataLoaders. Lockstep controls their order, division among processes, position and random numbers."""

import copy
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from typing import Any, Literal, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader

from lockstep.compat.torch import in_one_process
from lockstep.data.global_batches import GlobalBatch, GlobalBatches, ShareSpec, join_small_batches
from lockstep.data.loaders import (
    DEFAULTS,
    MicroBatches,
    MicroBatchInfo,
    Share,
    digest_of,
    from_workers,
    timed,
)
from lockstep.data.sampler import key_of
from lockstep.errors import TrainingFailed, UserError
from lockstep.machine.world import all_gather_objects

log = logging.getLogger("lockstep")

BatchScope = Literal["a share", "all", "its own"]  # what a process gets of a loader's batches


@dataclass(frozen=True, kw_only=True)
class Division(ShareSpec):
    """A ShareSpec, and the state of the run in this process."""

    seed: int
    position: Callable[[], tuple[int, int]] = lambda: (0, 0)  # the epoch, and how many of its micro-batches are done
    limit: int | None = None  # batches of an evaluation: a rest beyond them joins none of them
    reload_every: int = 0  # epochs after which the Trainer makes a new loader; 0: never
    number: Callable[[Any], int] = lambda _: 0  # index of a loader among those that train together
    waited: Callable[[float], None] = lambda _: None  # receives the seconds that training waited for a batch
    # whether all processes pass the same text; all must call it
    agree: Callable[[str], bool] = lambda text: len({*all_gather_objects(text)}) == 1

    @property
    def share_spec(self) -> ShareSpec:
        """The fields that can be sent to a worker process."""
        return ShareSpec(**{name: getattr(self, name) for name in ShareSpec.__dataclass_fields__})

    def seed_of(self, loader: Any, turn: int = 0) -> int:
        """Loaders that train together have different orders. A loader that restarts within an epoch has a new order."""
        number = self.number(loader) if self.trains else 0
        return key_of(f"loader {number}, turn {turn}", self.seed, 0) >> 1 if number or turn else self.seed


class LoaderPosition(NamedTuple):
    """Where a loader resumes."""

    epoch: int
    number: int  # index of the next micro-batch in the epoch
    times: int  # how often the loader has ended in this epoch
    done: int  # micro-batches since it last ended


# --- What the Trainer gets instead of a user's loader ---


class WrappedLoader:
    """Wraps a loader for the Trainer, and has its attributes. Starts loading only when the first batch is requested.

    Lightning creates the iterator before it restores a checkpoint and sets the epoch; workers would then fetch batches
    of epoch 0. The Trainer saves the position in checkpoints, so the loader has no state. It is not a DataLoader: for
    predictions, Lightning would replace its sampler.
    """

    batch_scope: BatchScope = "a share"
    is_indexed = False  # whether samples are read by index

    def __init__(self, loader: Any, division: Division) -> None:
        self.given, self.division = loader, division
        self.name = type(loader).__name__  # the class that determines the samples
        self.size: int | None = None  # of a global batch, if known
        self.notes: list[str] = []  # limits of the guarantees, for the first lines of a run
        self.began: tuple[int, int] | None = None  # the Trainer's position when iteration last started there
        self.ended: LoaderPosition | None = None  # where it restarts
        self.batch_info: dict[int, MicroBatchInfo] = {}  # metadata of the last micro-batches, by index in the epoch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "given":
            raise AttributeError(name)
        return getattr(self.given, name)

    @property
    def batch_sampler(self) -> Any:
        """Lightning 2.6 expects it on any object with a sampler."""
        return getattr(self.given, "batch_sampler", None)

    def __len__(self) -> int:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load. Both methods must exist for Lightning to resume within an epoch."""

    @property
    def length(self) -> int | None:
        try:
            return len(self)
        except TypeError:
            return None

    def items(self, seed: int, epoch: int, done: int) -> Iterator[tuple[Any, MicroBatchInfo]]:
        """The micro-batches of an epoch, after the first `done`."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """Starts at the Trainer's position; restarts if this loader ended before longer ones that train with it."""
        epoch, done = self.division.position()
        turn = self.ended
        # at the Trainer's position, or one behind it if Lightning prefetches
        continues = self.division.trains and turn and turn.epoch == epoch and turn.number - 1 <= done <= turn.number
        if turn is None or not continues:
            self.began, turn = (epoch, done), LoaderPosition(epoch, done, *divmod(done, self.length or done + 1))
            if turn.times:
                self.ended = turn
                return
        number = turn.number
        items = self.items(self.division.seed_of(self, turn.times), epoch, turn.done)
        remaining = None if self.length is None else self.length - turn.done
        for batch, info in timed(islice(items, remaining), self.division.waited):
            self.batch_info = {number: info} | {n: old for n, old in self.batch_info.items() if n == number - 1}
            yield batch
            number += 1
        self.check_length(epoch, turn.done + number - turn.number)
        self.ended = LoaderPosition(epoch, number, turn.times + 1, 0)
        if number == done and done and self.length is None:  # resumed run: where it last restarted is unknown
            length = sum(1 for _ in self.items(self.division.seed_of(self), epoch, 0))
            self.ended = LoaderPosition(epoch, done, *divmod(done, length)) if length else None

    def check_length(self, epoch: int, count: int) -> None:
        """Schedules and positions in checkpoints use the declared length. That of a stream is often an estimate."""
        if count >= (1 if self.length is None else self.length) or not (self.is_indexed or self.division.trains):
            return
        told = f"{self.name} yields {count} micro-batches in epoch {epoch + 1}, but declares {self.length or 'more than 0'}"
        if count and not self.is_indexed:
            return log.warning("%s; there is no validation at its end", told)
        raise TrainingFailed(f"{told}. Make them agree, and let no __getitem__ raise StopIteration.")

    def require_agreement(self, digest: str) -> None:
        """All processes call this with the digest of what they have read."""
        if self.division.world > 1 and not self.division.agree(digest):
            raise UserError(
                f"{self.name} returns different samples in each process. Lockstep divides each batch among the processes, so the samples must be the "
                "same in all of them: use random numbers of torch, NumPy or Python, or set_epoch, and nothing that depends on the rank."
            )

    def close(self) -> None:
        """Ends persistent workers."""

    @property
    def title(self) -> str:
        """One line on the batches, for the first lines of a run."""
        division, size = self.division, self.size
        if self.batch_scope == "a share" and size is not None:
            low, high = size // division.parts, math.ceil(size / division.parts)
            text = f"batch {size} = {division.world} x {high if low == high else f'{low} or {high}'}"
        elif division.world == 1:
            text = f"batches of {self.name}"
        elif self.batch_scope == "a share":
            text = f"batches of {self.name}, divided by {division.world}"
        else:
            text = f"each process {'computes the same' if self.batch_scope == 'all' else 'has its own'} batches"
        return f"{text} x {division.accumulate} accumulated" if division.accumulate > 1 else text

    def limits(self) -> Iterator[str]:
        size, parts = self.size, self.division.parts
        if size is not None and size % parts:
            yield f"batch_size={size} is the global batch and not divisible by {parts}: micro-batches have several sizes, so a module cannot gather them, and may be empty"
        if self.given.collate_fn not in DEFAULTS:
            yield "collate_fn receives one micro-batch of one process: if it pads or draws random numbers, batches depend on the number of processes"
        if self.given.generator is not None:
            yield "the generator of the DataLoader is ignored: its order and its workers' random numbers are derived from seed"


UNSEEDED = (
    "returns different samples for the same seed: it uses a source of randomness that cannot be seeded, so batches "
    "depend on the number of processes and workers, and a resume is not exact"
)


class ShareSampler:
    """The sampler of the DataLoader that reads: shares of each epoch in turn, so workers can persist."""

    def __init__(self) -> None:
        self.shares: Iterator[Share] = iter(())

    def __iter__(self) -> Iterator[Share]:
        return self.shares


class StandardLoader(WrappedLoader):
    """A DataLoader whose batches are divided among processes and accumulation steps."""

    is_indexed = True

    def __init__(self, loader: DataLoader[Any], division: Division) -> None:
        super().__init__(loader, division)
        self.order = GlobalBatches(loader.batch_sampler, division.world > 1, division.reload_every)
        self.name, self.size = f"{type(loader.dataset).__name__} with {self.order.name}", self.order.size
        self.notes = [*self.limits()]
        self.data, self.due = MicroBatches(loader.dataset, loader.collate_fn), ShareSampler()
        self.reader: DataLoader[Any] | None = None
        self.count: int | None = None  # of the batches of an evaluation, if known
        if division.world > 1 or division.trains:
            self.require_same_data()
        if division.parts > 1 and not division.trains:
            self.count = self.evaluated()

    def require_same_data(self) -> None:
        """Checks that processes have the same dataset, because each uses only its share of it.

        Compares the first sample, unless it differs each time or cannot be read alone.
        """
        data, digests = self.given.dataset, ["", ""]
        if self.division.world > 1 and (own := length_hint(data)) != (
            whole := in_one_process(lambda: length_hint(data))
        ):
            raise UserError(
                f"{type(data).__name__} has {own:,} samples in each of {self.division.world} processes and {whole:,} in one: it divides itself, and "
                "Lockstep divides each batch again. Let its length be that of all samples, or set strategy=single."
            )
        first = Share([0], 0, 0, self.division.seed, 0, MicroBatchInfo(1.0, "", None))
        # in a worker if the user has them: only workers may have opened the data
        options = {"num_workers": min(1, self.given.num_workers), "persistent_workers": False}
        with suppress(Exception):
            reader = from_workers(self.given, self.data, sampler=[first, first], **options)
            digests = [digest_of(batch) for batch, _ in reader]
        if digests[0] != digests[1]:
            digests[0] = ""
            self.notes.append(f"{self.name} {UNSEEDED}")
        self.require_agreement(digests[0])
        if self.order.is_own and len({self.first_keys(), self.first_keys()}) > 1:
            self.notes.append(f"{self.order.name} {UNSEEDED}")

    def first_keys(self) -> str:
        """Digest of the first batch of a copy of the sampler, which shares its datasets; empty if it has none."""
        shared, data = dict[int, Any](), self.given.dataset
        while data is not None and id(data) not in shared:
            shared[id(data)] = data
            data = getattr(data, "dataset", None)  # of a Subset
        with suppress(Exception):
            order = copy.deepcopy(self.order, shared)
            return digest_of(next(order.batches(self.division.seed, 0)).batch)
        return ""

    def evaluated(self) -> int | None:
        """The number of batches in an evaluation, if known. Raises UserError if they differ. All processes call this."""
        if self.length is None:
            return None
        division, size = self.division, self.order.size
        ((count, last),) = deque(enumerate(self.batches(division.seed, 0), 1), 1) or [(0, GlobalBatch(0, []))]
        self.require_agreement(last.digest)
        declared = len(self.order) if division.limit is None else min(len(self.order), division.limit)
        if size and (read := math.ceil((last.place + len(last.batch)) / size)) < declared:
            self.check_length(0, read)
        return count

    def __len__(self) -> int:
        return (len(self.order) if self.count is None else self.count) * self.division.accumulate

    def batches(self, seed: int, epoch: int, begin: int = 0) -> Iterator[GlobalBatch]:
        """The batches of an epoch, each with a sample for every process."""
        batches, division = self.order.batches(seed, epoch, begin), self.division
        return batches if division.trains else join_small_batches(islice(batches, division.limit), division.parts)

    def items(self, seed: int, epoch: int, done: int) -> Iterator[tuple[Any, MicroBatchInfo]]:
        division, order = self.division, self.order
        batches = self.batches(seed, epoch, done // division.accumulate)
        by_step = hasattr(order.sampler, "at")  # dropout counts rows from the step's first sample, else the epoch's
        shares = order.with_keys(division.shares(batches, done, seed, epoch, order.size, by_step), seed, epoch)
        if not self.given.num_workers and not (self.given.pin_memory and torch.cuda.is_available()):
            # keeps no samples while a step is computed, if they are read one by one
            return map(self.data.__getitem__, shares) if self.data.draws else self.data.batches(shares)
        self.due.shares = shares
        if self.reader is None:
            self.reader = from_workers(self.given, self.data, sampler=self.due)
        self.reader.generator.manual_seed(key_of("workers", seed, epoch) >> 1)
        return iter(self.reader)

    def close(self) -> None:
        self.reader, self.due.shares = None, iter(())


def wrapped_loaders(loaders: Any) -> list[WrappedLoader]:
    """The WrappedLoaders among the loaders of a Trainer, in any collection."""
    wrapped: list[Any] = []
    apply_to_collection(loaders, WrappedLoader, wrapped.append)
    return wrapped
