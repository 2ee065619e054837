"""Standard output and error of a process of a run: whatever becomes of them, training goes on. Free of torch.

A stream may be closed (`>&-`), full (`>/dev/full`), without a reader (`| head -1`), on a terminal that is gone, or take ASCII alone.
What it does not take is dropped; train.log has the same lines.
"""

import io
import os
import sys

NOTEBOOK = "LOCKSTEP_NOTEBOOK"  # tells processes of a run that their output goes to a notebook


class Unfailing(io.TextIOWrapper):
    """A text stream that gives up instead of raising: the null device takes what is left, and the output of libraries."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            discard(self.fileno())
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            discard(self.fileno())


def in_notebook() -> bool:
    """Whether standard output is that of a notebook's kernel, or of a process that a kernel started."""
    return NOTEBOOK in os.environ or type(sys.stdout).__module__.startswith("ipykernel.")


def discard(descriptor: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    os.set_inheritable(descriptor, True)  # if it was closed, the null device was opened under its number


def secure() -> None:
    """For a process that runs a command, not for one that calls `lockstep.train`."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # a file that is opened later would take its number, and its output
            discard(descriptor)
            setattr(sys, name, os.fdopen(descriptor, "w", errors="replace", closefd=False))
        elif isinstance(stream, io.TextIOWrapper):
            lines, through = stream.line_buffering, stream.write_through
            setattr(sys, name, Unfailing(stream.buffer, stream.encoding, "replace", None, lines, through))
