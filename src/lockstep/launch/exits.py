"""How a command ends: exit codes and messages on standard error instead of exceptions."""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from lockstep.errors import Preempted, Pruned, RunFailed, TrainingFailed, UserError
from lockstep.machine import signals

INTERRUPTED = 130


def exit_process(code: int) -> NoReturn:
    """Ends the process without Python's shutdown. During shutdown, gloo threads that release tensors need the GIL and abort the
    process ("terminate called without an active exception"), even after a run that was done."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if the parent process closed it
        with suppress(OSError):  # its reader is gone, or its disk is full
            stream.flush()
    os._exit(code)


def exit_code(call: Callable[[], Any], rank: int = 0) -> int:
    """Runs `call`; returns 0, or the exit code of its exception, which is reported on standard error."""
    try:
        call()
    except UserError as e:
        if rank == 0:  # all ranks found the same mistakes
            print("\n".join(f"error: {problem}" for problem in e.problems), file=sys.stderr)
        return 2
    except TrainingFailed as e:
        if rank == 0 or not isinstance(e, Preempted | Pruned):
            print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    except RunFailed as e:  # the failed process printed the reason
        return e.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as e:
        if isinstance(e.__context__, KeyboardInterrupt):  # Lightning's answer to Ctrl-C
            return INTERRUPTED
        if signals.received:  # Lightning's answer to SIGTERM
            return 1
        raise
    except Exception:
        prefix = f"[rank {rank}] " if rank else ""
        print("".join(prefix + line + "\n" for line in traceback.format_exc().splitlines()), end="", file=sys.stderr)
        return 1
    return 0
