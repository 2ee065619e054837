"""Warnings that a process will be ended soon. Free of torch.

SIGTERM comes from Kubernetes, from spot machines, from scancel, and from torchrun when it starts its workers again; SIGUSR1 and
SIGUSR2 come from SLURM before a time limit or a pre-emption, where `--signal` asks for it.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

WINDOWS = sys.platform == "win32"
REQUEUE = () if WINDOWS else (signal.SIGUSR1, signal.SIGUSR2)
WARNINGS = (signal.SIGTERM, *REQUEUE)

END_S = 120.0  # SLURM ends a job that was requeued at once, and one that it has told to end after KillWait or GraceTime
PATIENCE_S = 10.0  # one signal may come twice, from SLURM and from the process that started this one

received: list[signal.Signals] = []
first_s = 0.0  # when the first one came
before: dict[signal.Signals, Any] = {}  # the handlers that were there


def note(number: int, _: FrameType | None) -> None:
    global first_s
    warning, now_s = signal.Signals(number), time.monotonic()
    insists = warning is signal.SIGTERM and warning in received and now_s - first_s > PATIENCE_S
    if insists:  # it hangs
        signal.signal(warning, signal.SIG_DFL)
        os.kill(os.getpid(), warning)
    first_s = first_s if received else now_s
    received.append(warning)


def install() -> None:
    """Only in the main thread can signals be handled; elsewhere, as in some notebooks, they do what they did."""
    if threading.current_thread() is threading.main_thread():
        for warning in WARNINGS:
            signal.signal(warning, note)


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Within it, a warning ends nothing by itself; it is kept in `received`."""
    received.clear()
    before.update({warning: signal.getsignal(warning) for warning in WARNINGS})
    install()
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for warning, handler in before.items():
                signal.signal(warning, handler)


def requeue(rank: int, env: Mapping[str, str] = os.environ) -> None:
    """Puts this SLURM job back into the queue, if SLURM has warned of its time limit. Called when everything is saved.

    Rank 0 does it, and all wait for SLURM to end them: one that ended before could take the job with it, and a job that ends by
    itself when it is pre-empted has failed. submitit has a handler of its own, which keeps count of the time limits.
    """
    if not received or "SLURM_JOB_ID" not in env or "TORCHELASTIC_RUN_ID" in env:  # torchrun starts its workers again
        return
    asked = [warning for warning in received if warning in REQUEUE]
    if asked and rank == 0:
        put_back(asked[0], env)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(END_S)


def put_back(warning: signal.Signals, env: Mapping[str, str]) -> None:
    handler = before.get(warning)
    if callable(handler):
        handler(warning, None)
        return
    of_array = f"{env.get('SLURM_ARRAY_JOB_ID')}_{env.get('SLURM_ARRAY_TASK_ID')}"
    job = of_array if "SLURM_ARRAY_JOB_ID" in env else env["SLURM_JOB_ID"]
    assert re.fullmatch(r"\d+(_\d+)?", job)
    print(f"{warning.name}: everything is saved; job {job} goes back into the queue", file=sys.stderr, flush=True)
    subprocess.run(["scontrol", "requeue", job], check=True)
