"""How a command ends: exit codes and messages on standard error instead of exceptions."""

import errno
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from lockstep.config.words import readable
from lockstep.errors import RunFailed, TrainingFailed, UserError, outcome_of
from lockstep.machine import process

INTERRUPTED = outcome_of(KeyboardInterrupt()).exit_code
AGAIN = "rerun the command"
MOST = 50  # problems that a message lists
SPOKEN_S = 5.0  # for rank 0 to say what is wrong: torchrun ends all processes as soon as one has ended
# Of gloo and nccl where another process has ended, or has not answered within strategy.timeout_s.
LOST = re.compile(
    "Connection closed by peer|Connection reset by peer|Broken pipe|Connection was likely closed|NCCL communicator was aborted"
    "|Timed out waiting|Application timeout caused pair closure"
)


def disk_error(error: BaseException, again: str) -> str:
    """What happened to the disk, and what to do `again`; empty if nothing did."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return ""
    return (
        f"{error.filename or 'a file'} could not be written: {error.strerror}. What was saved before is still there. Free some "
        f"space or repair the disk, then {again}."
    )


def lost_process(error: BaseException) -> str:
    """What an error of gloo or nccl means; empty if no other process is missing. The traceback is in train.log."""
    if process.store is None or not isinstance(error, RuntimeError) or not LOST.search(str(error)):
        return ""
    why, _, _ = str(error).partition("\n")
    return (
        f"the connection to another process is lost: {why}. That process printed the first error; if none did, it hangs, or "
        "the network to it is down."
    )


def report(error: BaseException, rank: int, again: str = AGAIN) -> list[str]:
    """What a process says of the error that ends it; nothing if another process says it."""
    prefix = f"[rank {rank}] " if rank else ""
    if isinstance(error, UserError):  # all ranks found the same mistakes
        if rank and "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(SPOKEN_S)
        more = len(error.problems) - MOST
        told = [f"error: {problem}" for problem in error.problems[:MOST]] + [f"error: and {more:,} more"] * (more > 0)
        return [] if rank else told
    if isinstance(error, TrainingFailed):
        return [] if rank and error.alike else [f"error: {prefix}{error}"]
    if isinstance(error, RunFailed) or outcome_of(error).status == "interrupted":
        return []
    if why := disk_error(error, again) or lost_process(error):
        return [f"error: {prefix}{why}"]
    return [prefix + line for line in readable("".join(traceback.format_exception(error))).splitlines()]


def exit_code(call: Callable[[], Any], rank: int = 0, again: str = AGAIN) -> int:
    """Runs `call`; returns 0, or the exit code of its exception, which is reported on standard error."""
    try:
        call()
    except SystemExit as e:
        if isinstance(e.__context__, KeyboardInterrupt):  # Lightning's answer to Ctrl-C
            return INTERRUPTED
        raise
    except BaseException as e:
        print(readable("".join(f"{line}\n" for line in report(e, rank, again))), end="", file=sys.stderr)
        return outcome_of(e).exit_code
    return 0
