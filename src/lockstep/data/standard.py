"""DataLoaders as people bring them: dataset, collate function and workers are theirs; order, division, position and random numbers are Lockstep's."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, default_collate

from lockstep.data.global_batches import Cut, Global, Order, at_least
from lockstep.data.loaders import (
    FromWorkers,
    Indexed,
    MicroBatches,
    ResumableLoader,
    Share,
    Told,
    begin_worker,
    digest_of,
    timed,
)
from lockstep.data.sampler import key_of
from lockstep.errors import UserError

Gets = Literal["a share", "all", "its own"]  # of the batches of a loader: a process
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


class Turn(NamedTuple):
    """Where a loader goes on."""

    epoch: int
    number: int  # of the next micro-batch in the epoch
    times: int  # that it has ended in this epoch
    done: int  # micro-batches since then


# --- What the Trainer gets in place of a user's loader ---


class Brought(ResumableLoader):
    """A user's loader in place of which the Trainer gets this one. It has the attributes of the user's."""

    gets: Gets = "a share"

    def __init__(self, given: Any, division: Division) -> None:
        self.given, self.division = given, division
        self.name = type(given).__name__  # of what decides about the samples
        self.size: int | None = None  # of a global batch, if it is known
        self.notes: list[str] = []  # for the first lines of a run: what limits its promises
        self.began: tuple[int, int] | None = None  # the Trainer's position when it was last asked to go on from there
        self.ended: Turn | None = None  # where it begins again
        self.told: dict[int, Told] = {}  # of the last micro-batches, by their number in the epoch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "given":
            raise AttributeError(name)
        return getattr(self.given, name)

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]
        return getattr(self.given, "batch_sampler", None)

    @property
    def length(self) -> int | None:
        try:
            return len(self)
        except TypeError:
            return None

    def items(self, seed: int, epoch: int, done: int) -> Iterator[tuple[Any, Told]]:
        """The micro-batches of an epoch after those that are done."""
        raise NotImplementedError

    def counted(self, seed: int, epoch: int) -> int:
        """How many micro-batches an epoch has, where nothing else tells."""
        return sum(1 for _ in self.items(seed, epoch, 0))

    def __iter__(self) -> Iterator[Any]:
        """From the Trainer's position on; or from its beginning, where loaders of several lengths take turns and this one has ended."""
        epoch, done = self.division.position()
        turn = self.ended
        # at the Trainer's position; or one behind it, where Lightning fetches ahead
        goes_on = self.division.trains and turn and turn.epoch == epoch and turn.number - 1 <= done <= turn.number
        if turn is None or not goes_on:
            self.began, turn = (epoch, done), Turn(epoch, done, *divmod(done, self.length or done + 1))
            if turn.times:
                self.ended = turn
                return
        number = turn.number
        items = self.items(self.division.seed_of(self, turn.times), epoch, turn.done)
        left = None if self.length is None else self.length - turn.done
        for batch, told in timed(islice(items, left), self.division.waited):
            self.told = {number: told} | {n: each for n, each in self.told.items() if n == number - 1}
            yield batch
            number += 1
        self.ended = Turn(epoch, number, turn.times + 1, 0)
        if (
            number == done and done and self.length is None
        ):  # a run that was resumed: nobody knows where it had begun again
            length = self.counted(self.division.seed_of(self), epoch)
            self.ended = Turn(epoch, done, *divmod(done, length)) if length else None

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
        if self.gets == "all" and division.world == 1:
            return f"batches of {self.name}{accumulated}"
        if self.gets == "all":
            return f"each process computes the same batches{accumulated}"
        if self.gets == "its own":
            return f"each process has its own batches{accumulated}"
        if size is None:
            return f"batches of {self.name}, divided by {division.world}{accumulated}"
        least, most = size // division.parts, math.ceil(size / division.parts)
        return f"batch {size} = {division.world} x {most if least == most else f'{least} or {most}'}{accumulated}"

    def limits(self) -> Iterator[str]:
        size, parts = self.size, self.division.parts
        if size is not None and size < parts:
            yield f"batch_size={size} is the global batch, and a step has {parts} micro-batches, of which {parts - size} stay empty. Set it to {parts} or more"
        elif size is not None and size % parts:
            yield f"batch_size={size} does not divide by {parts}, so tensors of several processes have several sizes: a module cannot gather them"
        if self.given.collate_fn is not default_collate:
            yield "collate_fn gets what one process computes at once: where it pads or draws, batches differ with the number of processes"
        if self.given.generator is not None:
            yield "the generator of a DataLoader is not used: its order and the random numbers of its workers follow from seed"


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
        self.name, self.size = f"{type(given.dataset).__name__} with {self.order.name}", self.order.size
        self.notes = [*self.limits()]
        self.data, self.due = MicroBatches(given.dataset, given.collate_fn), Due()
        self.reader: FromWorkers | None = None
        self.count: int | None = None  # of the batches of an evaluation, if it is known
        if division.world > 1:
            self.require_same_data()
        if division.world > 1 and not division.trains:
            self.count = self.evaluated()

    def read_apart(self, *keys: list[Any]) -> Iterator[Any]:
        """Micro-batches outside of an epoch. By a worker if the user has some: a process may not have opened what its workers open."""
        told = Told(1.0, "", None)
        shares = [(Share(each, 0, 0, self.division.seed, 0, told),) for each in keys]
        options = {"num_workers": min(1, self.given.num_workers), "persistent_workers": False}
        return (batch for batch, _ in from_workers(self.given, Indexed(self.data), sampler=shares, **options).batches())

    def require_same_data(self) -> None:
        """Processes may have datasets of their own, of which each would use its share. Compares the first sample, unless it is another one
        each time or cannot be read alone."""
        found = ["", ""]
        with suppress(Exception):
            found = [digest_of(batch) for batch in self.read_apart([0], [0])]
        self.require_agreement(found[0] if found[0] == found[1] else "")

    def evaluated(self) -> int | None:
        """How many batches an evaluation has, if that is known. All processes call it.

        Raises UserError if they have other ones, or if one cannot make its last batch.
        """
        division = self.division
        if self.length is None:
            return None
        batches = enumerate(at_least(self.order.batches(division.seed, 0), division.world), 1)
        ((count, last),) = deque(batches, 1) or [(0, Global(0, []))]
        self.require_agreement(last.digest)
        if last.joined:
            (share,) = division.shares(iter([last]), 0, division.seed, 0, None)
            try:
                next(self.read_apart(share.keys))
            except Exception as e:
                raise UserError(
                    f"the last {len(last.batch)} samples of an evaluation must be one batch, or {division.world} processes cannot divide them, and "
                    f"collate_fn fails: {e}. Let it pad, give the loader as many samples as can be divided, or set strategy=single."
                ) from e
        return count

    def __len__(self) -> int:
        return len(self.order) * self.division.accumulate if self.count is None else self.count

    def shares(self, done: int, seed: int, epoch: int) -> Iterator[Share]:
        division, order = self.division, self.order
        batches = order.batches(seed, epoch, done // division.accumulate)
        divided = batches if division.trains else at_least(batches, division.world)
        return division.shares(divided, done, seed, epoch, order.size)

    def items(self, seed: int, epoch: int, done: int) -> Iterator[tuple[Any, Told]]:
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
