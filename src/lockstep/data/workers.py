"""Explains how processes that load data ended, which torch reports from the main process."""

import re
import signal

from lockstep.errors import chain

LOST = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([^.]+)\.|exited unexpectedly(?: with exit code (\d+))?)"
)
SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}
WHY = {
    signal.SIGKILL: ", which usually means that memory ran out",
    signal.SIGBUS: ": there was no room in /dev/shm, through which batches are passed",
}
ADVICE = (
    "Try fewer data.num_workers, or data.num_workers=0 to load data in the main process. "
    "A training run continues from its last checkpoint with resume=auto."
)


def lost(error: BaseException) -> str | None:
    """How a worker ended, if that is what the error says."""
    found = [match for each in chain(error) if isinstance(each, RuntimeError) and (match := LOST.search(str(each)))]
    if not found:
        return None
    pids, by, code = max((match.groups() for match in found), key=lambda groups: sum(map(bool, groups)))
    how = f"ended with exit code {code}" if code else "ended"
    if number := SIGNALS.get(by):
        how = f"was ended by {signal.Signals(number).name}{WHY.get(number, '')}"
    return f"a process that loads data (pid {pids}) {how}. {ADVICE}"
