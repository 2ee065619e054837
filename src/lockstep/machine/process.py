"""Tunes processes that Lockstep started; restores a caller's process. Free of torch."""

import contextlib
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FAILED = "failed"  # in the store: a rank that has ended in failure
store: Any = None  # of torch.distributed, which the processes of this attempt share (strategies/rendezvous.py)
owned = False  # whether this process exists to run a command; not in a notebook or a caller of `lockstep.train`


def own() -> None:
    global owned
    owned = True


def report_failure(rank: int) -> None:
    """Tells the other processes, which may not notice it in a collective (callbacks/watch.py)."""
    if store is not None:
        with contextlib.suppress(RuntimeError):  # its server is gone
            store.set(FAILED, str(rank))


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restores the environment, the arguments, the import path, the working directory and signal handlers afterwards."""
    environment, argv, path, folder = dict(os.environ), list(sys.argv), list(sys.path), Path.cwd()
    main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()} if main_thread else {}
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        sys.argv[:], sys.path[:] = argv, path
        os.chdir(folder)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:  # None: not set from Python
                signal.signal(number, handler)


@contextlib.contextmanager
def libraries_restored() -> Iterator[None]:
    """Restores loggers, warning filters, torch's settings and random states afterwards. Imports torch."""
    import numpy as np
    import torch

    randomness = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    with logging_restored(), warnings_restored(), torch_restored():
        try:
            yield
        finally:
            random.setstate(randomness[0])
            np.random.set_state(randomness[1])
            torch.set_rng_state(randomness[2])
            if gpus:
                torch.cuda.set_rng_state_all(gpus)


@contextlib.contextmanager
def logging_restored() -> Iterator[None]:
    """Restores existing loggers; those created meanwhile have no earlier state."""
    loggers = [logging.root, *(x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger))]
    before = [(x, x.level, x.propagate, x.disabled, list(x.handlers), list(x.filters)) for x in loggers]
    handlers = [(x, x.level, list(x.filters)) for logger in loggers for x in logger.handlers]
    try:
        yield
    finally:
        for logger, level, propagate, disabled, own_handlers, filters in before:
            if logger.level != level:  # setting it clears the caches of all loggers; Lightning has hundreds
                logger.setLevel(level)
            logger.propagate, logger.disabled = propagate, disabled
            logger.handlers[:], logger.filters[:] = own_handlers, filters
        for handler, level, filters in handlers:
            handler.setLevel(level)
            handler.filters[:] = filters


@contextlib.contextmanager
def warnings_restored() -> Iterator[None]:
    """`warnings.catch_warnings`, and whether warnings go to the log, which it does not restore."""
    to_log = warnings.showwarning.__module__ == "logging"
    with warnings.catch_warnings():
        try:
            yield
        finally:
            logging.captureWarnings(False)
            if to_log:
                logging.captureWarnings(True)


@contextlib.contextmanager
def torch_restored() -> Iterator[None]:
    import torch

    cuda: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    # Both of torch's interfaces, the older one first, because it also sets the newer one's values.
    names = [(cuda, "allow_tf32"), (cudnn, "allow_tf32"), (cuda, "fp32_precision"), (cudnn.conv, "fp32_precision"),
             (cudnn.rnn, "fp32_precision"), (cudnn, "benchmark"), (cudnn, "deterministic")]  # fmt: skip
    flags: list[tuple[Any, str, Any]] = []
    for place, name in names:
        with contextlib.suppress(RuntimeError):  # the caller has used the newer interface, so the older one refuses
            flags.append((place, name, getattr(place, name)))
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=only_warn)
        for place, name, value in flags:
            setattr(place, name, value)
