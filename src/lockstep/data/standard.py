"""DataLoaders as people bring them: dataset, collate function and workers are theirs; order, division, position and random numbers are Lockstep's."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, default_collate

from lockstep.data.global_batches import Cut, Global, Order, at_least
from lockstep.data.loaders import FromWorkers, Indexed, MicroBatches, ResumableLoader, Share, begin_worker, timed
from lockstep.data.sampler import key_of
from lockstep.errors import UserError

OPTIONS = "num_workers", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers"


@dataclass(frozen=True, kw_only=True)
class Division(Cut):
    """And where this process is in the run."""

    seed: int
    position: Callable[[], tuple[int, int]] = lambda: (0, 0)  # the epoch, and how many micro-batches of it are done
    number: Callable[[Any], int] = lambda _: 0  # of a loader among those that train together
    waited: Callable[[float], None] = lambda _: None  # gets the seconds that training waits for each batch
    agree: Callable[[str], bool] = lambda _: True  # whether all processes pass the same text; each must call it

    @property
    def cut(self) -> Cut:
        """What a worker process can get."""
        return Cut(**{name: getattr(self, name) for name in Cut.__dataclass_fields__})

    def seed_of(self, loader: Any, turn: int = 0) -> int:
        """Loaders that train together have different orders, and a loader that begins again within an epoch has a new one."""
        number = self.number(loader) if self.trains else 0
        return int(key_of(f"loader {number}, turn {turn}", self.seed, 0)[0]) >> 1 if number or turn else self.seed


# --- What the Trainer gets in place of a user's loader ---


class Brought(ResumableLoader):
    """A user's loader in place of which the Trainer gets this one. It has the attributes of the user's."""

    is_divided = True  # each process computes a share of each global batch
    alike = False  # each process computes all of it

    def __init__(self, given: Any, division: Division) -> None:
        self.given, self.division = given, division
        self.name = type(given).__name__  # of what decides about the samples
        self.size: int | None = None  # of a global batch, if it is known
        self.notes: list[str] = []  # for the first lines of a run: what limits its promises
        self.began: tuple[int, int] | None = None  # the position of the last iteration
        self.told: dict[
            int, tuple[float, str]
        ] = {}  # weight and digest of the last micro-batches, by their number in the epoch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "given":
            raise AttributeError(name)
        return getattr(self.given, name)

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]
        return getattr(self.given, "batch_sampler", None)

    def items(self, seed: int, epoch: int, done: int) -> Iterator[tuple[Any, float, str]]:
        """Batch, weight and digest of each micro-batch after those that are done."""
        raise NotImplementedError

    def counted(self, seed: int, epoch: int) -> int:
        """How many micro-batches an epoch has, where nothing else tells."""
        return sum(1 for _ in self.items(seed, epoch, 0))

    def __iter__(self) -> Iterator[Any]:
        """From the Trainer's position on. If loaders of several lengths take turns, the shorter ones begin again within an epoch."""
        epoch, done = self.division.position()
        first = self.began is None or self.began[0] != epoch
        self.began = epoch, done
        try:
            length = len(self)
        except TypeError:
            length = done + 1 if first else self.counted(self.division.seed_of(self), epoch)
        if length == 0 or (first and done >= length):
            return  # it had ended
        turn, done_of_turn = divmod(done, length)
        items = self.items(self.division.seed_of(self, turn), epoch, done_of_turn)
        for number, (batch, weight, digest) in enumerate(timed(items, self.division.waited), done):
            self.told = {number: (weight, digest)} | {n: told for n, told in self.told.items() if n == number - 1}
            yield batch

    def require_agreement(self, digest: str) -> None:
        """All processes call it with what they have read."""
        if self.division.world > 1 and not self.division.agree(digest):
            raise UserError(
                f"{self.name} gives other samples in each process. Lockstep divides each batch among the processes: let it give the samples of all "
                "of them, by torch's, NumPy's or Python's random numbers or by set_epoch, and remove what depends on the rank."
            )

    def close(self) -> None:
        """Ends workers that stay."""

    @property
    def title(self) -> str:
        """For the first lines of a run."""
        division, size = self.division, self.size
        accumulated = f" x {division.accumulate} accumulated" if division.accumulate > 1 else ""
        if self.alike:
            return f"each process computes the same batches{accumulated}"
        if not self.is_divided:
            return f"each process has its own batches{accumulated}"
        if size is None:
            return f"batches of {self.name}, divided by {division.world}{accumulated}"
        least, most = size // division.parts, math.ceil(size / division.parts)
        return f"batch {size} = {division.world} x {most if least == most else f'{least} or {most}'}{accumulated}"

    def limits(self) -> Iterator[str]:
        size, parts = self.size, self.division.parts
        if size is not None and size < parts:
            yield f"batch_size={size} is the global batch, and a step has {parts} micro-batches: {parts - size} of them are empty. Set it to {parts} or more"
        if self.given.collate_fn is not default_collate:
            yield "collate_fn gets what one process computes at once: where it pads or draws, batches differ with the number of processes"


class Due:
    """The sampler of the DataLoader that reads: shares of one epoch after the other, so workers can stay."""

    def __init__(self) -> None:
        self.shares: Iterator[Share] = iter(())

    def __iter__(self) -> Iterator[tuple[Share]]:
        return ((share,) for share in self.shares)


def from_workers(given: DataLoader[Any], data: Any, **options: Any) -> FromWorkers:
    """Micro-batches that the user's workers read."""
    return FromWorkers(
        data,
        worker_init_fn=partial(begin_worker, given.worker_init_fn),
        generator=torch.Generator(),  # of the seeds of workers, which would be drawn from the process's own
        **{name: getattr(given, name) for name in OPTIONS} | options,
    )


class StandardLoader(Brought):
    """A DataLoader whose batches are divided among processes and accumulation."""

    def __init__(self, given: DataLoader[Any], division: Division) -> None:
        super().__init__(given, division)
        self.order = Order(given.batch_sampler, division.world > 1)
        self.name, self.size = self.order.name, self.order.size
        self.notes = [*self.limits()]
        self.data, self.due = MicroBatches(given.dataset, given.collate_fn), Due()
        self.reader: FromWorkers | None = None
        self.length = self.evaluated() if division.world > 1 and not division.trains else None

    def evaluated(self) -> int | None:
        """How many batches an evaluation has, if that is known. All processes call it.

        Raises UserError if they have other ones, or if one cannot make its last batch.
        """
        division = self.division
        try:
            len(self.order)
        except TypeError:
            return None
        batches = enumerate(at_least(self.order.batches(division.seed, 0), division.world), 1)
        ((count, last),) = deque(batches, 1) or [(0, Global(0, []))]
        self.require_agreement(last.digest)
        if last.joined:
            try:
                self.data(next(division.shares(iter([last]), 0, division.seed, 0, None)))
            except Exception as e:
                raise UserError(
                    f"the last {len(last.batch)} samples of an evaluation must be one batch, or {division.world} processes cannot divide them, and "
                    f"collate_fn fails: {e}. Let it pad, give the loader as many samples as can be divided, or set strategy=single."
                ) from e
        return count

    def __len__(self) -> int:
        return len(self.order) * self.division.accumulate if self.length is None else self.length

    def shares(self, done: int, seed: int, epoch: int) -> Iterator[Share]:
        division, order = self.division, self.order
        batches = order.batches(seed, epoch, done // division.accumulate)
        divided = batches if division.trains else at_least(batches, division.world)
        return division.shares(divided, done, seed, epoch, order.size)

    def items(self, seed: int, epoch: int, done: int) -> Iterator[Any]:
        self.due.shares = self.shares(done, seed, epoch)
        self.reader = self.reader or from_workers(self.given, Indexed(self.data), sampler=self.due)
        self.reader.loader.generator.manual_seed(int(key_of("workers", seed, epoch)[0]) >> 1)
        return self.reader.batches()

    def counted(self, seed: int, epoch: int) -> int:
        return sum(1 for _ in self.shares(0, seed, epoch))

    def close(self) -> None:
        self.reader, self.due.shares = None, iter(())


def standard(loaders: Any) -> list[Brought]:
    """Those among the loaders of a Trainer, in whatever collection."""
    found: list[Any] = []
    apply_to_collection(loaders, Brought, found.append)
    return found
