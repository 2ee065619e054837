"""How a command ends: exit codes and messages on standard error instead of exceptions."""

import errno
import os
import re
import sys
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from lockstep.config.words import readable
from lockstep.errors import RunFailed, TrainingFailed, UserError, outcome_of
from lockstep.machine import process

INTERRUPTED = outcome_of(KeyboardInterrupt()).exit_code
LOOK_S = 1.0  # seconds between two looks for torchrun's agent
SPOKEN_S = 5.0  # for rank 0 to say what is wrong: torchrun ends all processes as soon as one has ended
# Of gloo and nccl where another process has ended. The traceback is in train.log.
LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL communicator was aborted",
    "Connection was likely closed",
)
SILENT = ("Timed out waiting", "Application timeout caused pair closure")  # gloo, after strategy.timeout_s
PEER = re.compile(r"\[([\da-fA-F.:]+)\]:\d+")  # how gloo names it


def disk_error(error: Exception) -> str:
    """What happened to the disk; empty if nothing did."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return ""
    return (
        f"{error.filename or 'a file'} could not be written: {error.strerror}. What was saved before is still there. Free some "
        "space or repair the disk, then type the command again with resume=auto."
    )


def lost_process(e: Exception) -> str:
    """What an error of gloo or nccl means for people; empty if no other process is missing."""
    error = str(e) if isinstance(e, RuntimeError) and process.store is not None else ""
    if any(sign in error for sign in SILENT):
        return "no word from another process within strategy.timeout_s: it hangs, or the network to it is down"
    address = PEER.search(error)
    whose = f" at {address[1]}" if address else ""
    lost = any(sign in error for sign in LOST)
    return f"the connection to another process{whose} is lost: the first error is that one's" if lost else ""


def exit_process(code: int) -> NoReturn:
    """Ends the process without Python's shutdown. During shutdown, gloo threads that release tensors need the GIL and abort the
    process ("terminate called without an active exception"), even after a run that was done."""
    for stream in (sys.stdout, sys.stderr):  # which never raise: machine/process.py
        stream.flush()
    os._exit(code)


def exit_with_agent(agent: int, env: Mapping[str, str] = os.environ) -> NoReturn:
    """Ends this process soon after torchrun's agent, its parent. Without its agent a new process would wait `strategy.timeout_s`
    for the others, and one that trains would be left behind."""
    while os.getppid() == agent:
        time.sleep(LOOK_S)
    if env.get("LOCAL_RANK") == "0":
        print(f"error: torchrun's agent (process {agent}) was ended, so its processes end too.", file=sys.stderr)
    exit_process(1)


def refused_variable(error: Exception) -> str:
    """What torch says about a variable of the environment that it refuses while it is imported; empty otherwise."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    imported = any(code.co_name == "<module>" and "/site-packages/torch/" in code.co_filename for code in frames)
    named = [name for name in re.findall(r"\b[A-Z]+_[A-Z_]+\b", str(error)) if imported and name in os.environ]
    if not named:
        return ""
    why = str(error).strip().partition("\n")[0]
    return f"{named[0]}={os.environ[named[0]]} in the environment is refused by torch: {why}. Type unset {named[0]}, then the command again."


def exit_code(call: Callable[[], Any], rank: int = 0) -> int:
    """Runs `call`; returns 0, or the exit code of its exception, which is reported on standard error."""
    prefix = f"[rank {rank}] " if rank else ""
    try:
        call()
    except UserError as e:
        if rank == 0:  # all ranks found the same mistakes
            print(readable("\n".join(f"error: {problem}" for problem in e.problems)), file=sys.stderr)
        elif "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(SPOKEN_S)
        return e.exit_code
    except TrainingFailed as e:
        if rank == 0 or not e.alike:
            print(readable(f"error: {prefix}{e}"), file=sys.stderr)
        return e.exit_code
    except RunFailed as e:  # the failed process printed the reason
        return e.exit_code
    except (KeyboardInterrupt, BdbQuit):  # Ctrl-C, or `quit` in the debugger
        return INTERRUPTED
    except SystemExit as e:
        if isinstance(e.__context__, KeyboardInterrupt):  # Lightning's answer to Ctrl-C
            return INTERRUPTED
        if process.received:  # Lightning's answer to SIGTERM
            return 1
        raise
    except Exception as e:
        refused = refused_variable(e)
        if why := refused or disk_error(e) or lost_process(e):
            print(readable(f"error: {prefix}{why}"), file=sys.stderr)
            return 2 if refused else 1
        lines = readable(traceback.format_exc()).splitlines()
        print("".join(prefix + line + "\n" for line in lines), end="", file=sys.stderr)
        return 1
    return 0
