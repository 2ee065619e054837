"""Turns exceptions of a command into exit codes and messages on standard error."""

import errno
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from lockstep.config.formatting import print_error, readable
from lockstep.errors import RunFailed, TrainingFailed, UserError, outcome_of
from lockstep.machine import process

INTERRUPTED = outcome_of(KeyboardInterrupt()).exit_code
SPOKEN_S = 5.0  # time for rank 0 to print the error: torchrun ends all processes as soon as one has ended
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # full or read-only
# Messages of gloo and NCCL if another process has ended, or has not answered within strategy.timeout_s.
LOST = re.compile(
    "Connection closed by peer|Connection reset by peer|Broken pipe|Connection was likely closed|NCCL communicator was aborted|Timed out waiting|Application timeout caused pair closure"
)


def report(error: BaseException, rank: int) -> list[str]:
    """The lines that a process prints for the error that ends it; none if a different process prints them."""
    prefix = f"[rank {rank}] " if rank else ""
    if isinstance(error, UserError):  # the same on all ranks
        if rank and "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(SPOKEN_S)
        return [] if rank else [f"error: {problem}" for problem in error.problems]
    if isinstance(error, TrainingFailed):
        return [] if rank and error.alike else [f"error: {prefix}{error}"]
    if isinstance(error, RunFailed) or outcome_of(error).status == "interrupted":
        return []
    if isinstance(error, OSError) and error.errno in DISK:
        advice = "Free some space or repair the disk, then rerun the command; resume=auto continues a run."
        return [f"error: {prefix}{error.filename or 'a file'} could not be written: {error.strerror}. {advice}"]
    # the traceback is in train.log
    if process.store is not None and isinstance(error, RuntimeError) and LOST.search(str(error)):
        return [f"error: {prefix}the connection to another process is lost: {str(error).splitlines()[0]}"]
    return [prefix + line for line in readable("".join(traceback.format_exception(error))).splitlines()]


def exit_code(call: Callable[[], Any], rank: int = 0) -> int:
    """Runs `call`. Returns 0, or the exit code of its exception, which is printed on standard error."""
    try:
        call()
    except SystemExit as e:
        if isinstance(e.__context__, KeyboardInterrupt):  # raised by Lightning after Ctrl-C
            return INTERRUPTED
        raise
    except BaseException as e:
        if lines := report(e, rank):
            print_error("\n".join(lines))
        return outcome_of(e).exit_code
    return 0


def after_output(code: int) -> int:
    """The exit code of a command that ends with `code`: 1 if only its output could not be written."""
    sys.stdout.flush()
    if code or not process.unwritten:
        return code
    print_error(f"error: standard output could not be written: {process.unwritten[0]}.")
    return 1
