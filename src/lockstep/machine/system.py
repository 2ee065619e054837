"""What differs between Linux, macOS and Windows. Other modules ask this one (tests/test_layers.py). Free of torch."""

import ctypes
import os
import platform
import signal
import stat
import sys
from pathlib import Path
from typing import IO, Any

WINDOWS, MACOS = sys.platform == "win32", sys.platform == "darwin"
HAS_MPS = MACOS and platform.machine() == "arm64"
USER_ID = os.getuid() if hasattr(os, "getuid") else 0
CONTAINER_LIMITS = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
# Flags of os.open: do not wait for the writer of a pipe; do not follow a link.
NO_WAITING, NO_LINKS = getattr(os, "O_NONBLOCK", 0), getattr(os, "O_NOFOLLOW", 0)
# Signals: of SLURM before a time limit or a preemption; of a terminal that closes.
REQUEUE = () if WINDOWS else (signal.SIGUSR1, signal.SIGUSR2)
HANGUP = () if WINDOWS else (signal.SIGHUP,)

fcntl: Any = None
resource: Any = None
if not WINDOWS:
    import fcntl
    import resource


def lock_shared(file: IO[bytes]) -> None:
    """Locks an open file until it is closed; not on Windows. Raises BlockingIOError: it is locked; OSError: no locks here."""
    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_private_folder(path: Path) -> bool:
    """Whether `path` is a folder, not a link to one, that only this user can access. Windows has one for each user."""
    info = path.lstat()
    return stat.S_ISDIR(info.st_mode) and (WINDOWS or (info.st_uid == USER_ID and not info.st_mode & 0o077))


def cores() -> int:
    """The number of cores that this process may use; SLURM and containers limit it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """The memory of this machine, or the limit of its container; 8 GiB if unknown."""
    if WINDOWS:
        return 8 * 2**30
    limits = [path.read_text(encoding="utf-8").strip() for path in CONTAINER_LIMITS if path.is_file()]
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(int(limit) for limit in limits if limit.isdigit())])


def resident_peak_bytes() -> int | None:
    """Peak memory of this process so far; None if unknown."""
    return resource and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if MACOS else 1024)


def glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
