"""The lock of a run directory: one process at a time. The kernel releases it when the process ends, in whatever way. Free of torch.

It is a flock on train.log, which a run only appends to. Forked processes, such as the workers of a dataloader, give up their copy
of it, or it would outlive the run. On file systems without flock every lock is free.
"""

import contextlib
import os
import time
from pathlib import Path

from lockstep.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FILE = "train.log"
RETRY_S = 1.0  # somebody may have looked at the lock just then
held: dict[Path, int] = {}  # descriptors of the locked files


def close_all() -> None:
    for descriptor in held.values():
        os.close(descriptor)
    held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=close_all)


def locked(descriptor: int, *, shared: bool = False) -> bool:
    """Whether this descriptor holds the lock now; True where there are no locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no flock
        pass
    return True


def is_taken(folder: Path) -> bool:
    """Whether a process holds the lock of this run directory."""
    try:
        descriptor = os.open(folder / FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not locked(descriptor, shared=True)
    finally:
        os.close(descriptor)


def refuse_if_taken(folder: Path, patience_s: float = 0.0) -> None:
    """Raises UserError if another process still trains in this directory after `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while is_taken(folder):
        if time.monotonic() >= deadline:
            raise UserError(
                f"{folder} is in use: another process trains there now. Wait until it ends, or stop it; then type the command "
                "again with resume=auto. Or type another run=<name>."
            )
        time.sleep(0.1)


def take(folder: Path) -> None:
    """Locks a run directory for this process, until `release`. Raises UserError: another process has it."""
    descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + RETRY_S
    while not locked(descriptor):
        if time.monotonic() > deadline:
            os.close(descriptor)
            refuse_if_taken(folder)
            return take(folder)
        time.sleep(0.05)
    held[folder] = descriptor


def release(folder: Path) -> None:
    with contextlib.suppress(KeyError):
        os.close(held.pop(folder))
