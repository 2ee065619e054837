"""Detects the process that hangs while the others wait for it, and ends all processes when one fails."""

import json
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import Any, ClassVar

import lightning.pytorch as pl

from lockstep.config.formatting import name_ranks, readable
from lockstep.errors import TrainingFailed
from lockstep.machine import process
from lockstep.run import RunFolder

QUIET, PATIENCE = 0.75, 0.1  # fractions of strategy.timeout_s: without a batch, and without an answer; sum below 1
LOOK_S = 2.0  # seconds between two checks, at most
NO_TIMEOUT = timedelta(days=20)  # torch counts milliseconds in 32 bits
END_S = 6.0  # seconds for a process to end by itself after another process failed
LIBRARIES = f"lib{os.sep}python"
WAITING = tuple(f"torch{os.sep}{part}{os.sep}" for part in ("distributed", "autograd"))  # DDP waits in backward

# What a process reports: its batch, how far it is within the batch, whether it waits for other processes in a
# collective (as far as the Python stack shows), the seconds since one of these changed, and its line of code.
SILENT: list[Any] = [-1, 0, False, float("inf"), "no response; the process may be stopped"]


def hanging_ranks(beats: dict[int, list[Any]], limit_s: float) -> list[int]:
    """The ranks that the others wait for: those that are silent, else those that are furthest behind.

    Empty if all are equally far, for example while all compile: then the collective's own timeout decides.
    """
    positions = [beat[:3] for beat in beats.values()]
    is_equal = min(positions, default=None) == max(positions, default=None) != SILENT[:3]
    is_quiet = not is_equal and all(beat[3] >= limit_s for beat in beats.values())
    return [rank for rank, beat in beats.items() if is_quiet and beat[:3] == min(positions)]


def lines_of(frame: FrameType | None) -> list[str]:
    """The lines of a thread, from the innermost. Reads no source: the file system may be what hangs."""
    return [f"{each.f_code.co_filename}:{line} ({each.f_code.co_name})" for each, line in traceback.walk_stack(frame)]


class Monitor(threading.Thread):
    """Exchanges heartbeats with the other processes, through its own connection to the store, and compares them."""

    def __init__(self, trainer: pl.Trainer, timeout_s: float) -> None:
        super().__init__(daemon=True)
        self.rank, self.ranks, self.watched = trainer.global_rank, range(trainer.world_size), threading.get_ident()
        self.store, self.over = process.store.clone(), threading.Event()
        self.key = f"watch/{self.store.add(f'watch/{self.rank}', 1)}"  # numbers the jobs; equal in all processes
        self.limit_s, self.patience_s = QUIET * timeout_s, PATIENCE * timeout_s
        self.folder = RunFolder(trainer.default_root_dir)
        self.advice = f"no batch finished for {self.limit_s:g} s, with strategy.timeout_s={timeout_s:g}. The stacks of the processes that responded are in {self.folder.path / 'logs'}."

    def finish(self, *, failed: bool) -> None:
        """Marks this process as finished. Unless it failed, it keeps watching until all processes are finished.

        Rank 0 may hang while it writes the report.
        """
        with suppress(RuntimeError):  # rank 0 is gone, and the store with it
            process.store.set(f"{self.key}/{self.rank}/left", "")
            if not failed:  # the store answers all at once; one that asks again finds it gone with rank 0
                process.store.wait([f"{self.key}/{rank}/left" for rank in self.ranks], NO_TIMEOUT)
        self.over.set()  # only now: if rank 0 is stopped, the requests above wait forever
        process.monitor = None

    def run(self) -> None:
        position, since_s = tuple[Any, ...](), 0.0
        seen: dict[tuple[int, bytes], float] = {}  # when a heartbeat of a rank was first read
        host = f"rank 0 of {len(self.ranks)}, or the launcher that hosts its store,"
        while not self.over.wait(min(LOOK_S, self.patience_s / 5)):
            lines, now_s = lines_of(sys._current_frames().get(self.watched)), time.monotonic()
            is_waiting = any(part in lines[0] for part in WAITING)
            current = (*HangDetector.progress, is_waiting and lines[0])
            if position != current:  # work before a collective does not count as waiting
                position, since_s, seen = current, now_s, {}
            outer_line = next((line for line in lines if LIBRARIES not in line), lines[0])
            # a request to a store whose process is stopped waits forever (torch 2.13)
            guard = threading.Timer(self.limit_s + self.patience_s, self.end_hanging, [host, SILENT[4]])
            guard.daemon = True
            guard.start()
            try:
                self.compare([*current[:2], is_waiting, now_s - since_s, f"in {outer_line}"], seen, now_s)
            except RuntimeError:  # the store has ended with its process, which has reported why
                if not self.over.wait(END_S):
                    process.end("")
            finally:
                guard.cancel()

    def compare(self, own: list[Any], seen: dict[tuple[int, bytes], float], now_s: float) -> None:
        """Ends this process if another one has failed, or if this one has to report that some hang."""
        self.store.set(f"{self.key}/{self.rank}", json.dumps(own))
        failed = self.store.compare_set(process.FAILED, "", "").decode()
        if failed and not self.over.wait(END_S):
            self.end(f"ended because rank {failed} failed")
        if own[3] < self.limit_s:
            return
        if not seen:
            self.log_stacks()
        beats: dict[int, list[Any]] = {}  # of the ranks that have not finished
        for rank in self.ranks:
            if not self.store.check([f"{self.key}/{rank}/left"]):
                beat = self.store.compare_set(f"{self.key}/{rank}", "", "")
                is_silent = now_s - seen.setdefault((rank, beat), now_s) > self.patience_s
                beats[rank] = json.loads(beat) if beat and not is_silent else SILENT
        hanging = hanging_ranks(beats, self.limit_s)
        if hanging and self.rank == min(rank for rank in self.ranks if beats.get(rank) is not SILENT):
            self.end_hanging(name_ranks(hanging, len(self.ranks)), beats[hanging[0]][4])
        if hanging and not self.over.wait(END_S):  # the process that reports it comes first
            process.end("")

    def log_stacks(self) -> None:
        stacks = ["\n".join(lines_of(frame)) for frame in sys._current_frames().values()]
        (process.log or sys.stderr).write("\n\n".join(["stacks of all threads: " + self.advice, *stacks, ""]))

    def end_hanging(self, who: str, symptom: str) -> None:
        self.log_stacks()
        self.end(f"{who} hung ({symptom}) while the other ranks waited: {self.advice}")

    def end(self, message: str) -> None:
        """Ends this process: the main thread may never return."""
        with suppress(Exception):
            if process.trains:
                self.folder.record_end(TrainingFailed(message))
        process.end(readable(f"error: {f'[rank {self.rank}] ' * (self.rank > 0)}{message}"))


class HangDetector(pl.Callback):
    """Monitors the processes of a run, from its first setup to the end of the job.

    A process may also hang between training and test, and requests to its store then wait forever. The hooks of a batch
    only assign a number.
    """

    progress: ClassVar[list[int]] = [0, 0]  # of this process: the batch, and how far it is within the batch

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.world_size > 1 and process.monitor is None:
            self.progress[:] = 0, 0
            process.monitor = Monitor(trainer, self.timeout_s)
            process.monitor.start()

    def move_on(self, *_: Any, **__: Any) -> None:
        self.progress[1] += 1

    on_before_backward = on_train_batch_end = on_validation_batch_start = on_validation_batch_end = move_on
    on_test_batch_start = on_test_batch_end = on_predict_batch_start = on_predict_batch_end = move_on

    def on_train_batch_start(self, *_: Any) -> None:
        self.progress[:] = self.progress[0] + 1, 0

    def on_exception(self, *_: Any) -> None:
        if process.monitor is not None:
            process.monitor.finish(failed=True)
