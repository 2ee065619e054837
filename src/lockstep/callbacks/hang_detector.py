"""Finds the process that hangs while the others wait for it, and ends all when one fails."""

import faulthandler
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import lightning.pytorch as pl

from lockstep.config.words import readable
from lockstep.errors import TrainingFailed
from lockstep.machine import process
from lockstep.machine.files import make_folder, open_log
from lockstep.run import RunFolder

QUIET, PATIENCE = 0.75, 0.1  # fractions of strategy.timeout_s: without a batch, and without an answer; together below 1
LOOK_S = 2.0  # seconds between two looks, at most
FOR_EVER = timedelta(days=20)  # torch counts milliseconds in 32 bits
END_S = 6.0  # seconds for a process to end by itself after another failed
LIBRARIES = f"lib{os.sep}python"
WAITING = tuple(f"torch{os.sep}{part}{os.sep}" for part in ("distributed", "autograd"))  # DDP waits in backward
monitors = itertools.count(1)  # of this process; equal in all processes


@dataclass(frozen=True)
class Heartbeat:
    """What a process reports of itself in the store."""

    beat: int  # grows while its thread runs
    place: Sequence[int]
    waits: bool  # for the others in a collective, as far as Python shows
    quiet_s: float  # since its last batch
    where: str


def where(frame: FrameType | None) -> tuple[str, str]:
    """The innermost line of a thread, and the innermost one that is not a library's."""
    stack = traceback.walk_stack(frame) if frame else ()
    lines = [f"{f.f_code.co_filename}:{line} ({f.f_code.co_name})" for f, line in stack] or ["an unknown place"]
    return lines[0], next((line for line in lines if LIBRARIES not in line and not line.startswith("<")), lines[0])


def hanging(beats: dict[int, Heartbeat], silent: Sequence[int], limit_s: float) -> list[int]:
    """The ranks that the others wait for: those that do not answer, else those that have done the least. Empty if all are equally far, as
    while all compile: then the collective's own timeout decides."""
    answers = {rank: beat for rank, beat in beats.items() if rank not in silent}
    if any(beat.quiet_s < limit_s for beat in answers.values()):
        return []
    places = {rank: (tuple(beat.place), beat.waits) for rank, beat in answers.items()}
    least, most = min(places.values(), default=None), max(places.values(), default=None)
    return list(silent) or [rank for rank, place in places.items() if place == least != most]


class Monitor:
    """Two threads of a process: one exchanges heartbeats through a connection of its own, the other decides.

    A request to a store whose process is stopped waits for ever (torch 2.13), therefore two.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int, timeout_s: float, folder: RunFolder) -> None:
        self.store, self.name, self.rank, self.size, self.folder = store, name, rank, size, folder
        self.stacks = folder.path / "logs" / f"rank-{rank}.log"  # not train.log, which an evaluation must not change
        self.timeout_s, self.limit_s, self.patience_s = timeout_s, QUIET * timeout_s, PATIENCE * timeout_s
        self.look_s = min(LOOK_S, self.patience_s / 5)
        self.place, self.thread = (0, 0), threading.get_ident()
        self.over = threading.Event()
        self.heartbeat = Heartbeat(0, self.place, False, 0.0, "")
        self.answers: dict[int, Heartbeat] = {}
        self.answered_s = time.monotonic()
        self.failed: int | None = None  # a rank
        self.left: set[int] = set()  # the ranks that have ended their part
        self.store_ended = False  # with the process that keeps it, which has said why

    def start(self) -> None:
        for loop in (self.exchange, self.decide):
            threading.Thread(target=loop, daemon=True).start()

    def leave(self, *, failed: bool) -> None:
        """Ends this process's part. One that has done it stays to watch the others: rank 0 may hang while it writes the report."""
        with suppress(RuntimeError):  # rank 0 is gone, and the store with it
            process.store.set(f"{self.name}/left/{self.rank}", "")
            if not failed:
                process.store.wait([f"{self.name}/left/{rank}" for rank in range(self.size)], FOR_EVER)
        self.over.set()  # not before: where rank 0 is stopped, the requests wait for ever
        process.monitor = None

    def exchange(self) -> None:
        try:
            while not self.over.wait(self.look_s):
                self.store.set(f"{self.name}/{self.rank}", json.dumps(asdict(self.heartbeat)))
                if self.store.check([process.FAILED]):
                    self.failed = int(self.store.get(process.FAILED))
                if self.heartbeat.quiet_s > self.limit_s:
                    left = self.ranks_with("left/")
                    names = {rank: f"{self.name}/{rank}" for rank in self.ranks_with("") - left}
                    answers = {rank: Heartbeat(**json.loads(self.store.get(name))) for rank, name in names.items()}
                    self.left, self.answers = left, answers
                self.answered_s = time.monotonic()
        except RuntimeError:
            self.store_ended = True

    def ranks_with(self, key: str) -> set[int]:
        return {rank for rank in range(self.size) if self.store.check([f"{self.name}/{key}{rank}"])}

    def decide(self) -> None:
        place, since_s, failed_s = self.place, time.monotonic(), float("inf")
        line, line_since_s = "", since_s
        seen: dict[int, tuple[int, float]] = {}  # the last beat of each rank, and since when
        while not self.over.wait(self.look_s):
            now_s = time.monotonic()
            if self.place != place:
                place, since_s = self.place, now_s
            innermost, outer = where(sys._current_frames().get(self.thread))
            if innermost != line:
                line, line_since_s = innermost, now_s
            waits = any(part in line for part in WAITING)
            # work before a collective is no waiting
            quiet_s = now_s - (max(since_s, line_since_s) if waits else since_s)
            if quiet_s > self.limit_s >= self.heartbeat.quiet_s:
                seen = {}
                with suppress(OSError):
                    make_folder(self.stacks.parent)
                    with open_log(self.stacks, "a", encoding="utf-8") as log:
                        print(f"no batch finished for {quiet_s:.0f} s; the threads:", file=log, flush=True)
                        faulthandler.dump_traceback(file=log, all_threads=True)
            self.heartbeat = Heartbeat(self.heartbeat.beat + 1, place, waits, quiet_s, outer)
            if self.failed is not None:
                failed_s = min(failed_s, now_s + END_S)
                if now_s > failed_s:
                    self.end(f"ended, because rank {self.failed} failed", reports=True)
            if quiet_s > self.limit_s:
                self.look_for_hanging(seen, now_s)

    def look_for_hanging(self, seen: dict[int, tuple[int, float]], now_s: float) -> None:
        beats = self.answers | ({} if self.rank in self.left else {self.rank: self.heartbeat})
        for rank in set(range(self.size)) - self.left:
            beat = beats[rank].beat if rank in beats else -1
            if rank not in seen or seen[rank][0] != beat:
                seen[rank] = beat, now_s
        others = {rank: s for rank, (_, s) in seen.items() if rank not in {self.rank, *self.left}}
        silent = [rank for rank, s in others.items() if now_s - s > self.patience_s]
        if lost := now_s - self.answered_s > self.patience_s:  # all are silent then
            silent = [0]
        ranks = hanging(beats, silent, self.limit_s)
        if not ranks:
            return
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        who += f" of {self.size}" + (", or the launcher that keeps its store," if lost else "")
        how = "no answer, as from a stopped process" if silent else f"in {beats[ranks[0]].where}"
        self.end(
            f"{who} hung ({how}) and the others waited for it: no batch was finished for {self.heartbeat.quiet_s:.0f} s, at "
            f"strategy.timeout_s={self.timeout_s:g}. The stacks of the processes that responded are in {self.stacks.parent}.",
            reports=not self.store_ended and (lost or self.rank == min(set(range(self.size)) - set(silent))),
        )

    def end(self, message: str, *, reports: bool) -> NoReturn:
        """Ends this process from its thread; the main one may never come back."""
        if not reports:
            time.sleep(END_S)  # the one that reports comes first
        else:
            with suppress(Exception):
                if process.trains:
                    self.folder.record_end(TrainingFailed(message))
            prefix = f"[rank {self.rank}] " if self.rank else ""
            print(readable(f"error: {prefix}{message}"), file=sys.stderr, flush=True)
        os._exit(1)


@dataclass(eq=False)
class HangDetector(pl.Callback):
    """Monitors the processes of a run, from its first setup to the end of the job: between training and test a process may hang as
    well, and requests to its store wait for ever. A hook of a batch only assigns a number."""

    timeout_s: float

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.world_size > 1 and process.store is not None and process.monitor is None:
            store, name, folder = process.store.clone(), f"watch/{next(monitors)}", RunFolder(trainer.default_root_dir)
            process.monitor = Monitor(store, name, trainer.global_rank, trainer.world_size, self.timeout_s, folder)
            process.monitor.start()

    def move_on(self, *_: Any, **__: Any) -> None:
        if process.monitor is not None:
            batch, part = process.monitor.place
            process.monitor.place = batch, part + 1

    on_before_backward = on_train_batch_end = move_on
    on_validation_batch_start = on_validation_batch_end = on_test_batch_start = on_test_batch_end = move_on
    on_predict_batch_start = on_predict_batch_end = move_on

    def on_train_batch_start(self, *_: Any) -> None:
        if process.monitor is not None:
            process.monitor.place = process.monitor.place[0] + 1, 0

    def on_exception(self, *_: Any) -> None:
        if process.monitor is not None:
            process.monitor.leave(failed=True)
