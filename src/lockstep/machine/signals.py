"""Signals that warn of the end of a process. Free of torch.

Kubernetes, spot machines, scancel, and torchrun when it restarts its workers send SIGTERM. SLURM sends SIGUSR1 or SIGUSR2 before a
time limit or a preemption, if `--signal` asks for it. A terminal that closes sends SIGHUP. Ctrl-C sends SIGINT: once is a warning,
twice ends the run. With several processes the terminal sends it to all of them, and whoever started them decides about the second one.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

WINDOWS = sys.platform == "win32"
REQUEUE = () if WINDOWS else (signal.SIGUSR1, signal.SIGUSR2)
WARNINGS = (signal.SIGTERM, *REQUEUE) if WINDOWS else (signal.SIGTERM, signal.SIGHUP, *REQUEUE)
SYSTEM = (signal.SIGTERM, *REQUEUE)  # SLURM ends a job that got one of these

END_S = 120.0  # wait so long for SLURM: it ends a requeued job at once, a warned one after KillWait or GraceTime
PATIENCE_S = 10.0  # within it, a second SIGTERM may be the same one, sent by SLURM and by the parent process

Handler = Callable[[int, FrameType | None], None]
received: list[signal.Signals] = []
supervised = False  # whether Lockstep's launcher started this process, and passes on its own signals
first_s = 0.0  # time of the first signal
before: dict[signal.Signals, Any] = {}  # the previous handlers


def on_signal(number: int, _: FrameType | None) -> None:
    global first_s
    warning, now_s = signal.Signals(number), time.monotonic()
    insists = warning is signal.SIGTERM and warning in received and now_s - first_s > PATIENCE_S
    if insists:  # a later second SIGTERM means that this process hangs
        signal.signal(warning, signal.SIG_DFL)
        os.kill(os.getpid(), warning)
    first_s = first_s if received else now_s
    received.append(warning)


def on_interrupt(number: int, frame: FrameType | None) -> None:
    """Notes a first Ctrl-C; a second one raises KeyboardInterrupt."""
    if signal.SIGINT in received:
        signal.default_int_handler(number, frame)
    on_signal(number, frame)
    if multiprocessing.parent_process() is not None:  # a worker of a dataloader, which the terminal interrupts too
        return
    with contextlib.suppress(OSError):  # not print, which may be running now
        os.write(2, b"\ninterrupted: the run saves after this step and ends; Ctrl-C again ends it at once\n")


def end_once(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt at the first Ctrl-C only: the parent process passes on what the terminal has sent already."""
    signal.signal(number, signal.SIG_IGN)
    signal.default_int_handler(number, frame)


def install(*, interrupt: Handler | None = None) -> None:
    """Notes warnings from now on; `interrupt` handles Ctrl-C. What is ignored stays so, as under nohup.

    Python handles signals in the main thread only; elsewhere, as in some notebooks, this does nothing.
    """
    if threading.current_thread() is threading.main_thread():
        for warning in (*WARNINGS, signal.SIGINT):
            handler = interrupt if warning is signal.SIGINT else on_signal
            if handler and signal.getsignal(warning) is not signal.SIG_IGN:
                signal.signal(warning, handler)


@contextlib.contextmanager
def noted(*, interrupt: Handler | None = None) -> Iterator[None]:
    """Within this context, a warning does not end the process but is noted in `received`; `interrupt` handles Ctrl-C."""
    received.clear()
    before.update({warning: signal.getsignal(warning) for warning in (*WARNINGS, signal.SIGINT)})
    install(interrupt=interrupt)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for warning, handler in before.items():
                signal.signal(warning, handler)


def requeue(rank: int, env: Mapping[str, str] = os.environ) -> None:
    """Requeues this SLURM job if SLURM warned of its time limit. Called when everything is saved.

    Rank 0 does it, and all ranks wait for SLURM to end them: a rank that ends earlier could end the job, and a preempted job that
    ends by itself counts as failed. submitit has its own handler, which counts the time limits.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in env  # it restarts its workers
    if by_torchrun or "SLURM_JOB_ID" not in env or not set(received) & set(SYSTEM):
        return
    asked = [warning for warning in received if warning in REQUEUE]
    if asked and rank == 0:
        requeue_job(asked[0], env)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(END_S)


def requeue_job(warning: signal.Signals, env: Mapping[str, str]) -> None:
    handler = before.get(warning)
    if callable(handler):
        handler(warning, None)
        return
    of_array = f"{env.get('SLURM_ARRAY_JOB_ID')}_{env.get('SLURM_ARRAY_TASK_ID')}"
    job = of_array if "SLURM_ARRAY_JOB_ID" in env else env["SLURM_JOB_ID"]
    assert re.fullmatch(r"\d+(_\d+)?", job)
    print(f"{warning.name}: everything is saved; job {job} is requeued", file=sys.stderr, flush=True)
    subprocess.run(["scontrol", "requeue", job], check=True)
