"""Loaders that cannot be indexed: streams, and loaders that create their own batches."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep.data.global_batches import GlobalBatch, ShareSpec, join_small_batches
from lockstep.data.keyed import IsolatedRandomState
from lockstep.data.loaders import MicroBatches, MicroBatchInfo, Share, digest_of, from_workers
from lockstep.data.sampler import key_of
from lockstep.data.standard import BatchScope, Division, StandardLoader, WrappedLoader

log = logging.getLogger("lockstep")
AGAIN = "a resumed run rereads the earlier data"


class StreamShares(MicroBatches, IterableDataset[Any]):
    """One process's micro-batches of a stream, which it reads entirely. Collates them too, as it runs in a worker."""

    def __init__(self, loader: DataLoader[Any], cut: ShareSpec) -> None:
        super().__init__(loader.dataset, loader.collate_fn)
        self.of_collate.used = {*range(len(self.of_collate.all))}  # from the first call on: samples cannot be reread
        self.share_spec, self.size, self.drop_last = cut, loader.batch_size or 1, loader.drop_last
        # seed, epoch, micro-batches done; shared with persistent workers
        self.place = torch.zeros(3, dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[Any]:
        seed, epoch, done = self.place.tolist()
        cut, batches = self.share_spec, self.global_batches(seed, epoch)
        rest = islice(batches if cut.trains else join_small_batches(batches, cut.parts), done // cut.accumulate, None)
        for share in cut.shares(rest, done, seed, epoch, self.size):
            yield self[share]

    def samples(self, share: Share) -> list[Any]:
        return share.keys

    def global_batches(self, seed: int, epoch: int) -> Iterator[GlobalBatch]:
        random_state, position, digest = IsolatedRandomState(key_of("order", seed, epoch), self.dataset), 0, ""
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        take = random_state.reader(lambda: self.dataset)
        while batch := take(self.size):
            if self.drop_last and len(batch) < self.size:
                return
            if self.share_spec.world > 1:
                digest = digest_of(batch, digest)
            yield GlobalBatch(position, batch, digest)
            position += len(batch)


class ComparedLoader(WrappedLoader):
    """A loader whose first batch is compared between processes when batches are first requested.

    The result determines what each process gets. Processes with different batches end an epoch together: otherwise
    they would wait for a process that has no more batches.
    """

    def __init__(self, loader: Any, division: Division) -> None:
        super().__init__(loader, division)
        self.undecided, self.equally_long = division.world > 1, True

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        if self.undecided:
            first = [*islice(batches, 1)]
            self.undecided = False
            restart = self.decide(self.division.agree(self.batch_info[max(self.batch_info)].digest if first else ""))
            self.equally_long = self.batch_scope != "its own" or self.division.agree(str(self.length))
            if restart:
                self.began = None
                return iter(self)
            batches = chain(first, batches)
        return self.together(batches) if self.batch_scope == "its own" and self.division.world > 1 else batches

    def decide(self, same: bool) -> bool:
        """Whether the batches must restart, because they are divided differently."""
        raise NotImplementedError

    def together(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if not self.division.agree("more"):
                log.warning("%s: one of the processes has no more batches, so the epoch ends here", self.name)
                return
            yield batch
        self.division.agree("no more")


class StreamLoader(ComparedLoader):
    """Batches of an IterableDataset.

    Each process reads the whole stream and collates its share, unless the stream divides itself.
    """

    def __init__(self, loader: DataLoader[Any], division: Division) -> None:
        super().__init__(loader, division)
        self.name, self.size = type(loader.dataset).__name__, loader.batch_size
        reads = "one worker per process reads" if loader.num_workers else "each process reads"
        self.notes = [f"{self.name} is a stream: {reads} all of it, and {AGAIN}", *self.limits()]
        self.begin(division.share_spec)

    def begin(self, cut: ShareSpec) -> None:
        self.data = StreamShares(self.given, cut)
        self.reader = from_workers(self.given, self.data, num_workers=min(1, self.given.num_workers))

    def decide(self, same: bool) -> bool:
        if not same:
            self.batch_scope, self.size = "its own", None
            self.notes = [
                f"{self.name} is a stream with different samples in each process: its batches are not divided, and {AGAIN}"
            ]
            self.begin(replace(self.division.share_spec, rank=0, world=1, accumulate=1))
        return not same

    def __len__(self) -> int:
        """Undefined until it is known whether the stream divides itself."""
        if not self.equally_long or (self.undecided and self.division.accumulate > 1):
            raise TypeError("a stream has no length")
        return len(self.given) * (self.division.accumulate if self.batch_scope == "a share" else 1)

    def items(self, seed: int, epoch: int, done: int) -> Iterator[tuple[Any, MicroBatchInfo]]:
        self.data.place.copy_(torch.tensor([seed, epoch, done]))
        return iter(self.reader)

    def close(self) -> None:
        self.begin(self.data.share_spec)


class UndividedLoader(ComparedLoader):
    """Batches of a custom loader, as it creates them, in a separate random state that is equal in all processes.

    To resume within an epoch, a run rereads the earlier batches.
    """

    batch_scope: BatchScope = "all"

    def __init__(self, loader: Any, division: Division, reason: str) -> None:
        super().__init__(loader, division)
        self.notes = [f"{reason}: its batches are not divided, and {AGAIN}"]

    def __len__(self) -> int:
        if not self.equally_long:
            raise TypeError("the length differs between processes")
        return len(self.given)

    def decide(self, same: bool) -> bool:
        self.batch_scope = "all" if same else "its own"
        return False

    def items(self, seed: int, epoch: int, done: int) -> Iterator[tuple[Any, MicroBatchInfo]]:
        take = IsolatedRandomState(key_of("order", seed, epoch), self.given).reader(lambda: self.given)
        for (batch,) in islice(iter(lambda: take(1), []), done, None):
            yield batch, MicroBatchInfo(1.0, digest_of(batch) if self.undecided else "", None)


def wrap_loader(loader: Any, division: Division) -> WrappedLoader:
    """Wraps a user's loader for the Trainer."""
    reason = ""
    if not isinstance(loader, DataLoader):
        reason = "is not a DataLoader"
    elif type(loader).__iter__ is not DataLoader.__iter__:
        reason = "overrides __iter__"
    elif loader.batch_size is None and loader.batch_sampler is None:
        reason = "has batch_size=None"
    if reason:
        return UndividedLoader(loader, division, f"{type(loader).__name__} {reason}")
    if isinstance(loader.dataset, IterableDataset):
        return StreamLoader(loader, division)
    return StandardLoader(loader, division)
