"""Detects the process that hangs while the others wait for it, and ends all processes when one fails."""

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

from lockstep.config.formatting import readable
from lockstep.errors import TrainingFailed
from lockstep.machine import process
from lockstep.machine.files import make_folder, open_log
from lockstep.run import RunFolder

QUIET, PATIENCE = 0.75, 0.1  # fractions of strategy.timeout_s: without a batch, and without an answer; sum below 1
LOOK_S = 2.0  # seconds between two checks, at most
NO_TIMEOUT = timedelta(days=20)  # torch counts milliseconds in 32 bits
END_S = 6.0  # seconds for a process to end by itself after another process failed
LIBRARIES = f"lib{os.sep}python"
WAITING = tuple(f"torch{os.sep}{part}{os.sep}" for part in ("distributed", "autograd"))  # DDP waits in backward
monitors = itertools.count(1)  # numbers the monitors of this process; equal in all processes


@dataclass(frozen=True)
class Heartbeat:
    """A process's state, as it is reported in the store."""

    beat: int  # increases while its thread runs
    progress: Sequence[int]
    waits: bool  # for other processes in a collective, as far as the Python stack shows
    quiet_s: float  # since its last batch
    where: str


def where(frame: FrameType | None) -> tuple[str, str]:
    """The innermost line of a thread, and its innermost line outside of libraries."""
    stack = traceback.walk_stack(frame) if frame else ()
    lines = [f"{f.f_code.co_filename}:{line} ({f.f_code.co_name})" for f, line in stack] or ["an unknown location"]
    return lines[0], next((line for line in lines if LIBRARIES not in line and not line.startswith("<")), lines[0])


def hanging_ranks(beats: dict[int, Heartbeat], silent: Sequence[int], limit_s: float) -> list[int]:
    """The ranks that the others wait for: those that do not answer, else those that are furthest behind.

    Empty if all are equally far, for example while all compile: then the collective's own timeout decides.
    """
    answers = {rank: beat for rank, beat in beats.items() if rank not in silent}
    if any(beat.quiet_s < limit_s for beat in answers.values()):
        return []
    progress = {rank: (tuple(beat.progress), beat.waits) for rank, beat in answers.items()}
    lowest, highest = min(progress.values(), default=None), max(progress.values(), default=None)
    return list(silent) or [rank for rank, position in progress.items() if position == lowest != highest]


class Monitor:
    """Two threads of a process: one exchanges heartbeats through its own connection, the other decides.

    Two, because a request to a store whose process is stopped waits forever (torch 2.13).
    """

    def __init__(self, store: Any, name: str, rank: int, size: int, timeout_s: float, folder: RunFolder) -> None:
        self.store, self.name, self.rank, self.size, self.folder = store, name, rank, size, folder
        self.stacks = folder.path / "logs" / f"rank-{rank}.log"  # not train.log, which an evaluation must not change
        self.timeout_s, self.limit_s, self.patience_s = timeout_s, QUIET * timeout_s, PATIENCE * timeout_s
        self.look_s = min(LOOK_S, self.patience_s / 5)
        self.progress, self.thread = (0, 0), threading.get_ident()
        self.over = threading.Event()
        self.heartbeat = Heartbeat(0, self.progress, False, 0.0, "")
        self.answers: dict[int, Heartbeat] = {}
        self.answered_s = time.monotonic()
        self.failed: int | None = None  # the rank that failed
        self.left: set[int] = set()  # the ranks that have finished
        self.store_ended = False  # with its process, which has reported why

    def start(self) -> None:
        for loop in (self.exchange, self.decide):
            threading.Thread(target=loop, daemon=True).start()

    def finish(self, *, failed: bool) -> None:
        """Marks this process as finished. Unless it failed, it keeps watching until all processes are finished.

        Rank 0 may hang while it writes the report.
        """
        with suppress(RuntimeError):  # rank 0 is gone, and the store with it
            process.store.set(f"{self.name}/left/{self.rank}", "")
            if not failed:
                process.store.wait([f"{self.name}/left/{rank}" for rank in range(self.size)], NO_TIMEOUT)
        self.over.set()  # only now: if rank 0 is stopped, the requests above wait forever
        process.monitor = None

    def exchange(self) -> None:
        try:
            while not self.over.wait(self.look_s):
                self.store.set(f"{self.name}/{self.rank}", json.dumps(asdict(self.heartbeat)))
                if self.store.check([process.FAILED]):
                    self.failed = int(self.store.get(process.FAILED))
                if self.heartbeat.quiet_s > self.limit_s:
                    finished = self.ranks_with("left/")
                    keys = {rank: f"{self.name}/{rank}" for rank in self.ranks_with("") - finished}
                    answers = {rank: Heartbeat(**json.loads(self.store.get(key))) for rank, key in keys.items()}
                    self.left, self.answers = finished, answers
                self.answered_s = time.monotonic()
        except RuntimeError:
            self.store_ended = True

    def ranks_with(self, key: str) -> set[int]:
        return {rank for rank in range(self.size) if self.store.check([f"{self.name}/{key}{rank}"])}

    def decide(self) -> None:
        last_place, since_s, failed_s = self.progress, time.monotonic(), float("inf")
        line, line_since_s = "", since_s
        last_beats: dict[int, tuple[int, float]] = {}  # the last beat of each rank, and when it was first seen
        while not self.over.wait(self.look_s):
            now_s = time.monotonic()
            if self.progress != last_place:
                last_place, since_s = self.progress, now_s
            innermost, outer = where(sys._current_frames().get(self.thread))
            if innermost != line:
                line, line_since_s = innermost, now_s
            is_waiting = any(part in line for part in WAITING)
            # work before a collective does not count as waiting
            quiet_s = now_s - (max(since_s, line_since_s) if is_waiting else since_s)
            if quiet_s > self.limit_s >= self.heartbeat.quiet_s:
                last_beats = {}
                with suppress(OSError):
                    make_folder(self.stacks.parent)
                    with open_log(self.stacks, "a", encoding="utf-8") as log:
                        print(f"no batch finished for {quiet_s:.0f} s; stacks of all threads:", file=log, flush=True)
                        faulthandler.dump_traceback(file=log, all_threads=True)
            self.heartbeat = Heartbeat(self.heartbeat.beat + 1, last_place, is_waiting, quiet_s, outer)
            if self.failed is not None:
                failed_s = min(failed_s, now_s + END_S)
                if now_s > failed_s:
                    self.end(f"ended because rank {self.failed} failed", reports=True)
            if quiet_s > self.limit_s:
                self.look_for_hanging(last_beats, now_s)

    def look_for_hanging(self, last_beats: dict[int, tuple[int, float]], now_s: float) -> None:
        beats = self.answers | ({} if self.rank in self.left else {self.rank: self.heartbeat})
        for rank in set(range(self.size)) - self.left:
            beat = beats[rank].beat if rank in beats else -1
            if rank not in last_beats or last_beats[rank][0] != beat:
                last_beats[rank] = beat, now_s
        since_s = {rank: began_s for rank, (_, began_s) in last_beats.items() if rank not in {self.rank, *self.left}}
        silent = [rank for rank, began_s in since_s.items() if now_s - began_s > self.patience_s]
        if store_lost := now_s - self.answered_s > self.patience_s:  # then no rank answers
            silent = [0]
        ranks = hanging_ranks(beats, silent, self.limit_s)
        if not ranks:
            return
        culprits = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        culprits += f" of {self.size}" + (", or the launcher that hosts its store," if store_lost else "")
        symptom = "no response; the process may be stopped" if silent else f"in {beats[ranks[0]].where}"
        self.end(
            f"{culprits} hung ({symptom}) while the other ranks waited: no batch finished for {self.heartbeat.quiet_s:.0f} s, with "
            f"strategy.timeout_s={self.timeout_s:g}. The stacks of the processes that responded are in {self.stacks.parent}.",
            reports=not self.store_ended and (store_lost or self.rank == min(set(range(self.size)) - set(silent))),
        )

    def end(self, message: str, *, reports: bool) -> NoReturn:
        """Ends this process from the monitor's thread; the main thread may never return."""
        if not reports:
            time.sleep(END_S)  # the reporting process comes first
        else:
            with suppress(Exception):
                if process.trains:
                    self.folder.record_end(TrainingFailed(message))
            prefix = f"[rank {self.rank}] " if self.rank else ""
            print(readable(f"error: {prefix}{message}"), file=sys.stderr, flush=True)
        os._exit(1)


@dataclass(eq=False)
class HangDetector(pl.Callback):
    """Monitors the processes of a run, from its first setup to the end of the job.

    A process may also hang between training and test, and requests to its store then wait forever. The hooks of a batch
    only assign a number.
    """

    timeout_s: float

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.world_size > 1 and process.store is not None and process.monitor is None:
            store, name, folder = process.store.clone(), f"watch/{next(monitors)}", RunFolder(trainer.default_root_dir)
            process.monitor = Monitor(store, name, trainer.global_rank, trainer.world_size, self.timeout_s, folder)
            process.monitor.start()

    def move_on(self, *_: Any, **__: Any) -> None:
        if process.monitor is not None:
            batch, part = process.monitor.progress
            process.monitor.progress = batch, part + 1

    on_before_backward = on_train_batch_end = move_on
    on_validation_batch_start = on_validation_batch_end = on_test_batch_start = on_test_batch_end = move_on
    on_predict_batch_start = on_predict_batch_end = move_on

    def on_train_batch_start(self, *_: Any) -> None:
        if process.monitor is not None:
            process.monitor.progress = process.monitor.progress[0] + 1, 0

    def on_exception(self, *_: Any) -> None:
        if process.monitor is not None:
            process.monitor.finish(failed=True)
