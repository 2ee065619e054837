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
from typing import Any

FAILED = "failed"  # in the store: a rank that has ended in failure
store: Any = None  # of torch.distributed, which the processes of this attempt share (strategies/rendezvous.py)
owned = False  # whether this process exists to run a command; not in a notebook or a caller of `lockstep.train`


def report_failure(rank: int) -> None:
    """Tells the other processes, which may not notice it in a collective (callbacks/watch.py)."""
    if store is not None:
        with contextlib.suppress(RuntimeError):  # its server is gone
            store.set(FAILED, str(rank))


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restores the environment, the arguments, the import path, the working directory and signal handlers afterwards."""
    environment, argv, path = dict(os.environ), list(sys.argv), list(sys.path)
    main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()} if main_thread else {}
    try:
        with contextlib.chdir("."):
            yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        sys.argv[:], sys.path[:] = argv, path
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:  # None: not set from Python
                signal.signal(number, handler)


@contextlib.contextmanager
def libraries_restored() -> Iterator[None]:
    """Restores loggers, warning filters, torch's settings and random states afterwards. Imports torch."""
    import numpy as np
    import torch

    cuda: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    threads = torch.get_num_threads()
    # Both of torch's interfaces, the older one last, so it is restored first: it also sets the newer one's values.
    flags = [(cudnn, "deterministic"), (cudnn, "benchmark"), (cudnn.rnn, "fp32_precision"), (cudnn.conv, "fp32_precision"),
             (cuda, "fp32_precision"), (cudnn, "allow_tf32"), (cuda, "allow_tf32")]  # fmt: skip
    with logging_restored(), warnings.catch_warnings(), contextlib.ExitStack() as after:
        after.callback(logging.captureWarnings, warnings.showwarning.__module__ == "logging")
        for place, name in flags:
            with contextlib.suppress(RuntimeError):  # the caller has used the newer interface, so the older one refuses
                after.callback(setattr, place, name, getattr(place, name))
        only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
        deterministic = torch.are_deterministic_algorithms_enabled()
        after.callback(torch.use_deterministic_algorithms, deterministic, warn_only=only_warn)
        after.callback(lambda: torch.set_num_threads(threads) if torch.get_num_threads() != threads else None)
        if torch.cuda.is_initialized():
            after.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        after.callback(torch.set_rng_state, torch.get_rng_state())
        after.callback(np.random.set_state, np.random.get_state())
        after.callback(random.setstate, random.getstate())
        yield


@contextlib.contextmanager
def logging_restored() -> Iterator[None]:
    """Restores existing loggers; those created meanwhile have no earlier state."""
    known = [x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger)]
    with contextlib.ExitStack() as after:
        after.callback(logging.root.setLevel, logging.root.level)  # last, because it clears the caches of all loggers
        for x in (logging.root, *known):
            attributes = {"propagate": x.propagate, "disabled": x.disabled, "handlers": list(x.handlers)}
            after.callback(vars(x).update, attributes, level=x.level, filters=list(x.filters))
            for handler in x.handlers:
                after.callback(vars(handler).update, level=handler.level, filters=list(handler.filters))
        yield
