"""How a command ends: exit codes and messages on standard error instead of exceptions."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from lockstep.config.words import readable
from lockstep.errors import Preempted, Pruned, RunFailed, TrainingFailed, UserError
from lockstep.machine import signals

INTERRUPTED = 130


def exit_process(code: int) -> NoReturn:
    """Ends the process without Python's shutdown. During shutdown, gloo threads that release tensors need the GIL and abort the
    process ("terminate called without an active exception"), even after a run that was done."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if the parent process closed it
        try:
            stream.flush()
        except BrokenPipeError:  # its reader has closed the pipe
            pass
        except OSError:  # the disk is full
            code = code or 1
    os._exit(code)


def exit_code(call: Callable[[], Any], rank: int = 0) -> int:
    """Runs `call`; returns 0, or the exit code of its exception, which is reported on standard error."""
    try:
        call()
    except UserError as e:
        if rank == 0:  # all ranks found the same mistakes
            print(readable("\n".join(f"error: {problem}" for problem in e.problems)), file=sys.stderr)
        return 2
    except TrainingFailed as e:
        if rank == 0 or not isinstance(e, Preempted | Pruned):
            print(readable(f"error: {e}"), file=sys.stderr)
        return 1
    except RunFailed as e:  # the failed process printed the reason
        return e.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit:
        if signals.received:  # Lightning's answer to SIGTERM
            return 1
        raise
    except Exception:
        prefix = f"[rank {rank}] " if rank else ""
        lines = readable(traceback.format_exc()).splitlines()
        print("".join(prefix + line + "\n" for line in lines), end="", file=sys.stderr)
        return 1
    return 0
