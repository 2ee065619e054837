"""Standard output and error of a process of a run: whatever becomes of them, training goes on. Free of torch.

A stream may be closed (`>&-`), full (`>/dev/full`), without a reader (`| head -1`), on a terminal that is gone, or take ASCII alone.
What it does not take is dropped; train.log has the same lines.
"""

import os
import sys
from typing import Any

NOTEBOOK = "LOCKSTEP_NOTEBOOK"  # tells processes of a run that their output goes to a notebook


class Unfailing:
    """A text stream that gives up instead of raising."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        stream.reconfigure(errors="replace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except OSError:
            self.give_up()
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            self.give_up()

    def give_up(self) -> None:
        """Puts the null device in its place, so what is left in buffers goes there, and so does the output of libraries."""
        discard(self.stream.fileno())


def in_notebook() -> bool:
    """Whether standard output is that of a notebook's kernel, or of a process that a kernel started."""
    return NOTEBOOK in os.environ or type(sys.stdout).__module__.startswith("ipykernel.")


def discard(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null == descriptor:  # it was closed
        os.set_inheritable(null, True)
    else:
        os.dup2(null, descriptor)
        os.close(null)


def secure() -> None:
    """For a process that runs a command, not for one that calls `lockstep.train`."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # a file that is opened later would take its number, and its output
            discard(descriptor)
            stream = os.fdopen(descriptor, "w", closefd=False)
        if hasattr(stream, "reconfigure"):
            setattr(sys, name, Unfailing(stream))
