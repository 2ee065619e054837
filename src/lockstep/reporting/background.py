"""Keeps a logger's server from stopping or slowing a run: the logger's calls run in a thread of its own."""

import http.client
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from lockstep.config.project import of_users_code
from lockstep.errors import chain

BUGS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)  # no connection and no disk
METHODS = ("log_metrics", "log_hyperparams", "save", "after_save_checkpoint", "on_run_end", "finalize")
PENDING = 10_000  # calls that wait; later ones are dropped
LATE_S = 60.0  # how long a call may take before it is reported, and how long a run waits for it at its end
SHORT_S = 5.0  # how long a run that failed waits: other processes may wait for it


class Background:
    """Runs the methods of one logger in order, in a thread. metrics.csv has every metric, whatever becomes of them."""

    def __init__(self, logger: Logger, name: str) -> None:
        self.name, self.warned = name, False
        self.calls: queue.Queue[Callable[[], Any] | None] = queue.Queue(PENDING)
        self.thread: threading.Thread | None = None
        self.began_s: float | None = None  # of the call that is running
        self.bug: Exception | None = None
        for method in filter(partial(hasattr, logger), METHODS):
            setattr(logger, method, partial(self.add, getattr(logger, method)))

    def add(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Raises the exception of an earlier call if it is a bug in the user's code."""
        if getattr(rank_zero_only, "rank", 0):  # most loggers do nothing there
            return call(*args, **kwargs)
        if self.bug is not None:
            error, self.bug = self.bug, None
            raise error
        if self.running_s() > LATE_S:
            self.warn("does not answer")
        try:
            self.calls.put_nowait(partial(call, *args, **kwargs))
        except queue.Full:
            self.warn("does not keep up")
        if self.thread is None:
            self.thread = threading.Thread(target=self.work, name=f"logger.{self.name}", daemon=True)
            self.thread.start()

    def work(self) -> None:
        while (call := self.calls.get()) is not None:
            self.began_s = time.monotonic()
            try:
                call()
            except Exception as e:
                if of_users_code(e) and not of_network(e):
                    self.bug = e
                else:
                    self.warn(f"fails with {type(e).__name__}: {e}")
            self.began_s = None

    def running_s(self) -> float:
        began_s = self.began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def warn(self, what: str) -> None:
        if not self.warned:
            self.warned = True
            logging.getLogger("lockstep").warning(
                "logger.%s %s. Training goes on without it; metrics.csv has all metrics.", self.name, what
            )

    def finish(self, wait_s: float) -> None:
        """Waits for the calls so far, for at most `wait_s`, and ends the thread."""
        if self.thread is None:
            return
        end_s = time.monotonic() + max(0.0, wait_s - self.running_s())
        with suppress(queue.Full):
            self.calls.put(None, timeout=max(0.0, end_s - time.monotonic()))
        self.thread.join(max(0.0, end_s - time.monotonic()))
        if self.thread.is_alive():
            self.warn("does not answer")
        self.thread = None
        if self.bug is not None:
            logging.getLogger("lockstep").warning("logger.%s failed", self.name, exc_info=self.bug)


def of_network(error: BaseException) -> bool:
    """Whether a connection failed, or a file could not be written."""
    return any(
        isinstance(each, OSError | http.client.HTTPException) and not isinstance(each, BUGS) for each in chain(error)
    )
