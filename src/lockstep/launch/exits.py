"""How a command ends: exit codes and messages on standard error instead of exceptions."""

import errno
import os
import re
import sys
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable
from typing import Any

from lockstep.config.words import readable
from lockstep.errors import RunFailed, TrainingFailed, UserError, outcome_of
from lockstep.machine import process

INTERRUPTED = outcome_of(KeyboardInterrupt()).exit_code
SPOKEN_S = 5.0  # for rank 0 to say what is wrong: torchrun ends all processes as soon as one has ended
# Of gloo and nccl where another process has ended. The traceback is in train.log.
LOST = re.compile(
    "Connection closed by peer|Connection reset by peer|Broken pipe|Connection was likely closed|NCCL communicator was aborted"
)
SILENT = re.compile("Timed out waiting|Application timeout caused pair closure")  # gloo, after strategy.timeout_s
PEER = re.compile(r"\[([\da-fA-F.:]+)\]:\d+")  # how gloo names it


def disk_error(error: Exception) -> str:
    """What happened to the disk; empty if nothing did."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return ""
    return (
        f"{error.filename or 'a file'} could not be written: {error.strerror}. What was saved before is still there. Free some "
        "space or repair the disk, then rerun the command with resume=auto."
    )


def lost_process(error: Exception) -> str:
    """What an error of gloo or nccl means for people; empty if no other process is missing."""
    text = str(error) if isinstance(error, RuntimeError) and process.store is not None else ""
    if SILENT.search(text):
        return "no word from another process within strategy.timeout_s: it hangs, or the network to it is down"
    address = PEER.search(text)
    whose = f" at {address[1]}" if address else ""
    lost = LOST.search(text)
    return f"the connection to another process{whose} is lost: the first error is that one's" if lost else ""


def exit_code(call: Callable[[], Any], rank: int = 0) -> int:
    """Runs `call`; returns 0, or the exit code of its exception, which is reported on standard error."""
    prefix, lines = f"[rank {rank}] " if rank else "", list[str]()
    try:
        call()
        return 0
    except (KeyboardInterrupt, BdbQuit):  # Ctrl-C, or `quit` in the debugger
        return INTERRUPTED
    except SystemExit as e:
        if isinstance(e.__context__, KeyboardInterrupt):  # Lightning's answer to Ctrl-C
            return INTERRUPTED
        if process.received:  # Lightning's answer to SIGTERM
            return 1
        raise
    except UserError as e:
        code = e.exit_code
        if rank == 0:  # all ranks found the same mistakes
            lines = [f"error: {problem}" for problem in e.problems]
        elif "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(SPOKEN_S)
    except TrainingFailed as e:
        code = e.exit_code
        if rank == 0 or not e.alike:
            lines = [f"error: {prefix}{e}"]
    except RunFailed as e:  # the failed process printed the reason
        code = e.exit_code
    except Exception as e:
        code = 1
        if why := disk_error(e) or lost_process(e):
            lines = [f"error: {prefix}{why}"]
        else:
            lines = [prefix + line for line in readable(traceback.format_exc()).splitlines()]
    print(readable("".join(f"{line}\n" for line in lines)), end="", file=sys.stderr)
    return code
