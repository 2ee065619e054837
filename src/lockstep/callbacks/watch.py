"""Finds the process that hangs while the others wait for it, and ends all when one fails."""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, NoReturn

import lightning.pytorch as pl

from lockstep.config.words import readable
from lockstep.errors import TrainingFailed
from lockstep.machine import process
from lockstep.run.folder import RunFolder

QUIET, PATIENCE = 0.75, 0.1  # shares of strategy.timeout_s: without a batch, and without an answer; together below 1
LOOK_S = 2.0  # seconds between two looks, at most
END_S, SAVE_S = 6.0, 60.0  # seconds for a process to end by itself after another failed, and more while it saves
LIBRARIES = f"lib{os.sep}python"
WAITING = tuple(f"torch{os.sep}{part}{os.sep}" for part in ("distributed", "autograd"))  # DDP waits in backward
watched = 0  # how many watchers this process has started; equal in all processes


@dataclass(frozen=True)
class Sign:
    """What a process says of itself in the store."""

    beat: int  # grows while its thread runs
    place: Sequence[int]
    waits: bool  # for the others in a collective, as far as Python knows
    quiet_s: float  # since its last batch
    where: str


def where(frame: FrameType | None) -> tuple[str, str]:
    """The innermost line of a thread, and the innermost one that is not a library's."""
    lines = []
    while frame is not None:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})")
        frame = frame.f_back
    lines = lines or ["an unknown place"]
    return lines[0], next((line for line in lines if LIBRARIES not in line and not line.startswith("<")), lines[0])


def hanging(signs: dict[int, Sign], silent: Sequence[int], limit_s: float) -> list[int]:
    """The ranks that the others wait for: those that do not answer, else those that have done the least. Empty if all are equally far, as
    while all compile: then the collective's own timeout decides."""
    answers = {rank: sign for rank, sign in signs.items() if rank not in silent}
    if any(sign.quiet_s < limit_s for sign in answers.values()):
        return []
    places = {rank: (tuple(sign.place), sign.waits) for rank, sign in answers.items()}
    least, most = min(places.values(), default=None), max(places.values(), default=None)
    return list(silent) or [rank for rank, place in places.items() if place == least != most]


class Watcher:
    """Two threads of a process: one exchanges signs through a connection of its own, the other judges.

    A request to a store whose process is stopped waits for ever (torch 2.13), therefore two.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int, timeout_s: float, folder: RunFolder) -> None:
        self.store, self.name, self.rank, self.size, self.folder = store, name, rank, size, folder
        self.timeout_s, self.limit_s, self.patience_s = timeout_s, QUIET * timeout_s, PATIENCE * timeout_s
        self.look_s = min(LOOK_S, self.patience_s / 5)
        self.place, self.thread = (0, 0), threading.get_ident()
        self.over = threading.Event()
        self.sign = Sign(0, self.place, False, 0.0, "")
        self.answers: dict[int, Sign] = {}
        self.answered_s = time.monotonic()
        self.failed: int | None = None  # a rank
        self.left = False  # whether a process has ended its part
        self.store_ended = False  # with the process that keeps it, which has said why

    def start(self) -> None:
        for loop in (self.exchange, self.judge):
            threading.Thread(target=loop, daemon=True).start()

    def key(self, what: object) -> str:
        return f"{self.name}/{what}"

    def exchange(self) -> None:
        try:
            while not self.over.wait(self.look_s):
                self.store.set(self.key(self.rank), json.dumps(asdict(self.sign)))
                self.left = self.store.check([self.key("left")])
                if self.store.check([process.FAILED]):
                    self.failed = int(self.store.get(process.FAILED))
                if self.sign.quiet_s > self.limit_s:
                    there = [rank for rank in range(self.size) if self.store.check([self.key(rank)])]
                    self.answers = {rank: Sign(**json.loads(self.store.get(self.key(rank)))) for rank in there}
                self.answered_s = time.monotonic()
        except RuntimeError:
            self.store_ended = True

    def judge(self) -> None:
        place, since_s, failed_s = self.place, time.monotonic(), float("inf")
        line, line_since_s = "", since_s
        seen: dict[int, tuple[int, float]] = {}  # the last beat of each rank, and since when
        while not self.over.wait(self.look_s):
            now_s = time.monotonic()
            if self.place != place:
                place, since_s = self.place, now_s
            innermost, own = where(sys._current_frames().get(self.thread))
            if innermost != line:
                line, line_since_s = innermost, now_s
            inside = any(part in line for part in WAITING)
            waits = inside and now_s - line_since_s > self.patience_s
            began_s = max(since_s, line_since_s) if inside else since_s  # work before a collective is no waiting
            if now_s - began_s > self.limit_s >= self.sign.quiet_s:
                self.write_stacks(now_s - began_s)
                seen = {}
            self.sign = Sign(self.sign.beat + 1, place, waits, now_s - began_s, own)
            saving = any(self.folder.checkpoints.glob("*.part")) if self.failed is not None else False
            if self.failed is not None and now_s > (failed_s := min(failed_s, now_s + END_S)) + saving * SAVE_S:
                self.end(f"ended, because rank {self.failed} failed", speaks=True)
            if self.sign.quiet_s > self.limit_s and not self.left:
                self.look_for_hanging(seen, now_s)

    def look_for_hanging(self, seen: dict[int, tuple[int, float]], now_s: float) -> None:
        signs = self.answers | {self.rank: self.sign}
        for rank in range(self.size):
            beat = signs[rank].beat if rank in signs else -1
            if rank not in seen or seen[rank][0] != beat:
                seen[rank] = beat, now_s
        others = {rank: since_s for rank, (_, since_s) in seen.items() if rank != self.rank}
        silent = [rank for rank, since_s in others.items() if now_s - since_s > self.patience_s]
        if lost := now_s - self.answered_s > self.patience_s:  # all are silent then
            silent = [0]
        if found := hanging(signs, silent, self.limit_s):
            speaker = min(set(range(self.size)) - set(silent))
            speaks = not self.store_ended and (lost or self.rank == speaker)
            self.end(self.words(found, signs, silent=bool(silent), lost=lost), speaks=speaks)

    def words(self, found: list[int], signs: dict[int, Sign], *, silent: bool, lost: bool) -> str:
        who = f"rank {found[0]}" if len(found) == 1 else f"ranks {', '.join(map(str, found))}"
        who += f" of {self.size}" + (", or the launcher that keeps its store," if lost else "")
        how = "no answer, as from a stopped process" if silent else f"in {signs[found[0]].where}"
        return (
            f"{who} hung ({how}) and the others waited for it: no batch was finished for {self.sign.quiet_s:.0f} s, at "
            f"strategy.timeout_s={self.timeout_s:g}. The stacks of the processes that answer are in {self.folder.log_file}."
        )

    def write_stacks(self, quiet_s: float) -> None:
        with suppress(OSError), self.folder.log_file.open("a", encoding="utf-8") as log:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"{stamp} WARNING [rank {self.rank}] no batch finished for {quiet_s:.0f} s; its threads:\n")
            log.flush()
            faulthandler.dump_traceback(file=log, all_threads=True)

    def end(self, words: str, *, speaks: bool) -> NoReturn:
        """Ends this process from its thread; the main one may never come back."""
        if not speaks:
            time.sleep(END_S)  # the one that speaks comes first
        else:
            with suppress(Exception):
                self.folder.record_end(TrainingFailed(words))
            prefix = f"[rank {self.rank}] " if self.rank else ""
            print(readable(f"error: {prefix}{words}"), file=sys.stderr, flush=True)
        os._exit(1)


class Watch(pl.Callback):
    """Watches the processes of a run, from its setup to its teardown. A hook of a batch only assigns a number."""

    watcher: Watcher | None = None

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        global watched
        if trainer.world_size == 1 or process.store is None:
            return
        watched += 1
        place, folder = (trainer.global_rank, trainer.world_size), RunFolder(trainer.default_root_dir)
        self.watcher = Watcher(process.store.clone(), f"watch/{watched}", *place, self.timeout_s, folder)
        self.watcher.start()

    def moved(self, *_: Any, **__: Any) -> None:
        if self.watcher is not None:
            batch, part = self.watcher.place
            self.watcher.place = batch, part + 1

    on_before_backward = on_train_batch_end = moved
    on_validation_batch_start = on_validation_batch_end = on_test_batch_start = on_test_batch_end = moved
    on_predict_batch_start = on_predict_batch_end = moved

    def on_train_batch_start(self, *_: Any) -> None:
        if self.watcher is not None:
            self.watcher.place = self.watcher.place[0] + 1, 0

    def leave(self, *_: Any, **__: Any) -> None:
        if self.watcher is not None:
            self.watcher.over.set()
            with suppress(RuntimeError):  # rank 0 is gone, and the store with it
                process.store.set(self.watcher.key("left"), "")
            self.watcher = None

    teardown = on_exception = leave
