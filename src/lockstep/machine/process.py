"""A process of a run: tuning, signals, standard output and error. Free of torch."""

import contextlib
import errno
import io
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from lockstep.errors import Interrupted, Preempted
from lockstep.machine import files
from lockstep.machine.system import HANGUP, REQUEUE

# --- Warning signals: the process must end soon. Free of torch ---
#
# SIGTERM: from Kubernetes, spot machines, scancel, and from torchrun when it restarts its workers.
# SIGUSR1, SIGUSR2: from SLURM before a time limit or a preemption, if `--signal` requests it.
# SIGHUP: from a terminal that closes.
# SIGINT: from Ctrl-C. The first one is a warning, the second one ends the run. The terminal sends it to all processes
# of a run; the process that started them handles the second one.

SYSTEM = (signal.SIGTERM, *REQUEUE)  # after one of these, SLURM ends the job
WARNINGS = (*SYSTEM, *HANGUP)

END_S = 120.0  # how long to wait for SLURM: it ends a requeued job at once, a warned one after KillWait or GraceTime

Handler = Callable[[int, FrameType | None], None]
received: list[signal.Signals] = []
started_by_lockstep = False  # whether Lockstep's launcher started this process and forwards signals to it
debug_rank: int | None = None  # the rank whose debugger has the terminal: no time limits, no progress bar
handlers_before: dict[signal.Signals, Any] = {}  # handlers of REQUEUE from before the run, such as submitit's


def on_signal(number: int, _: FrameType | None) -> None:
    warning = signal.Signals(number)
    received.append(warning)
    if debug_rank is not None:  # else the debugger's prompt waits forever; pdb catches KeyboardInterrupt
        error_class = Interrupted if warning is signal.SIGINT else Preempted
        raise error_class(f"ended by {warning.name} during debugging; nothing was saved.")


def on_interrupt(number: int, frame: FrameType | None) -> None:
    """Records each Ctrl-C, to be forwarded to other processes. The second one also raises KeyboardInterrupt."""
    is_second = signal.SIGINT in received
    on_signal(number, frame)
    if is_second:
        signal.default_int_handler(number, frame)
    if multiprocessing.parent_process() is not None:  # a dataloader worker: the terminal sends it SIGINT too
        return
    with contextlib.suppress(OSError):  # not print(): this handler may have interrupted one
        os.write(2, b"\ninterrupted: the run saves after this step and ends; press Ctrl-C again to end it at once\n")


def end_once(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt at the first Ctrl-C only: the parent process then forwards the same Ctrl-C.

    The first one may have been recorded in training. Lightning restores this handler when training ends.
    """
    signal.signal(number, signal.SIG_IGN)
    if signal.SIGINT not in received:
        signal.default_int_handler(number, frame)


def install(*, interrupt: Handler | None = None) -> None:
    """Records warning signals from now on; `interrupt` handles Ctrl-C. Ignored signals stay ignored, as under nohup.

    Does nothing outside the main thread, as in some notebooks: Python handles signals in the main thread only.
    """
    if threading.current_thread() is threading.main_thread():
        for number, handler in (*((warning, on_signal) for warning in WARNINGS), (signal.SIGINT, interrupt)):
            if handler and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)


@contextlib.contextmanager
def handlers_restored() -> Iterator[None]:
    """Restores the signal handlers afterwards. Only the main thread can change them."""
    main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()} if main_thread else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:  # None: not set from Python
                signal.signal(number, handler)


@contextlib.contextmanager
def recording_signals(*, interrupt: Handler | None = None) -> Iterator[None]:
    """Within the block, warning signals are recorded in `received` and do not end the process; see `install`."""
    received.clear()
    handlers_before.update({warning: signal.getsignal(warning) for warning in REQUEUE})
    with handlers_restored():
        install(interrupt=interrupt)
        yield


def requeue(rank: int, env: Mapping[str, str] = os.environ) -> None:
    """Requeues this SLURM job if SLURM warned of its time limit. Call it when everything is saved.

    Rank 0 requeues the job. All ranks then wait for SLURM to end them: a rank that exits earlier could end the job, and
    a preempted job that exits by itself counts as failed. Submitit's own handler, which counts the time limits, is
    called instead if it is installed.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in env  # torchrun restarts its workers
    if by_torchrun or "SLURM_JOB_ID" not in env or not set(received) & set(SYSTEM):
        return
    warning = next((number for number in received if number in REQUEUE), None)
    if warning and rank == 0 and callable(handler := handlers_before.get(warning)):
        handler(warning, None)
    elif warning and rank == 0:
        job = env["SLURM_JOB_ID"]
        if "SLURM_ARRAY_JOB_ID" in env:  # the SLURM_JOB_ID of one task is that of the whole array
            job = f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
        print(f"{warning.name}: everything is saved; job {job} is requeued", file=sys.stderr, flush=True)
        subprocess.run(["scontrol", "requeue", job], check=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(END_S)


# --- The end of a process ---

LOOK_S = 1.0  # seconds between two checks that the parent process is alive


def exit_process(code: int) -> NoReturn:
    """Ends the process without Python's shutdown.

    During shutdown, gloo threads that release tensors need the GIL and abort the process ("terminate called without an
    active exception"), even after a successful run.
    """
    for stream in (sys.stdout, sys.stderr):  # these never raise, see Stream
        stream.flush()
    os._exit(code)


class LastOfAll:
    """Registered with atexit, ends the process with exit code `ended[0]` after all other exit handlers.

    An ordinary handler would run before those registered earlier. `__del__` runs later, when Python releases the
    handlers that it has called.
    """

    def __init__(self, ended: list[int]) -> None:
        self.ended = ended

    def __call__(self) -> None:
        """Does nothing: `__del__` does the work."""

    def __del__(self) -> None:
        if self.ended:
            exit_process(self.ended[0])


def end_with_parent(*, has_pipe: bool, message: str = "") -> None:
    """Ends this process soon after its parent, however the parent ended.

    `has_pipe`: standard input is a pipe to which the parent never writes, so it closes with the parent. Otherwise it
    may be a terminal, and the parent's process id is polled.
    """
    parent = os.getppid()

    def wait() -> None:
        while os.read(0, 1) if has_pipe else os.getppid() == parent:
            time.sleep(LOOK_S)
        end(message)

    threading.Thread(target=wait, daemon=True).start()


def end(message: str) -> NoReturn:
    """Ends this process at once, from a thread: the main thread may never return, and standard output may be stuck."""
    if message:
        print(message, file=sys.stderr, flush=True)
    os._exit(1)


# --- Standard output and error of a process of a run. Free of torch ---
#
# A stream may be closed (`>&-`), full (`>/dev/full`), without a reader (`| head -1`), on a terminal that is gone, or
# ASCII only. Output that it cannot take is dropped and training continues: the logs have the same lines. The command then
# ends with exit code 1, unless the reader of a pipe ended first (launch/exits.py).

unwritten: list[str] = []  # why standard output could not be written

from_notebook = False  # whether a notebook's kernel started this process
ESCAPES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|\x1b\]8;[^\x1b]*\x1b\\|\r")  # includes rich's links
BAR = re.compile(r"(?<![^ \n])[\u2501\u2578\u257a]{8,}[ \n]")  # rich's progress bar, as it is drawn last


class Stream(io.TextIOWrapper):
    """Standard output or error that never raises and copies its text to the rank's log."""

    def write(self, text: str) -> int:
        if log is not None:
            log.write(text)
        try:
            super().write(text)
        except OSError as e:
            self.drop(e)
        return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as e:
            self.drop(e)

    def drop(self, error: OSError) -> None:
        discard(self.fileno())
        if self is not sys.stderr and error.errno != errno.EPIPE:
            unwritten.append(str(error.strerror))


def in_notebook() -> bool:
    """Whether standard output belongs to a notebook's kernel, or to a process that a kernel started."""
    return from_notebook or type(sys.stdout).__module__.startswith("ipykernel.")


def discard(descriptor: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    os.set_inheritable(descriptor, True)  # if it was closed, the null device was opened with its number


def protect_streams() -> None:
    """Makes standard output and error safe. For processes that run a command, not for callers of `lockstep.train`."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # closed: a file opened later would get its number, and so its output
            discard(descriptor)
            setattr(sys, name, Stream(open(descriptor, "wb", closefd=False), "utf-8", "replace"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and not isinstance(stream, Stream):
            line_buffering, write_through = stream.line_buffering, stream.write_through
            setattr(sys, name, Stream(stream.buffer, stream.encoding, "replace", None, line_buffering, write_through))


class RankLog:
    """Copies the output of this process to `logs/rank-<n>.log` of its run.

    The text stays in memory until the run's folder exists.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.path = folder, folder / "logs" / f"rank-{rank}.log"
        self.early, self.owner = list[str](), os.getpid()
        self.file: IO[bytes] | None = None
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        global log
        log = self

    def write(self, text: str) -> None:
        plain = ESCAPES.sub("", text)
        if bar_match := BAR.search(plain):
            plain = plain[: plain.rfind("\n", 0, bar_match.start()) + 1]
        with self.lock, contextlib.suppress(OSError, ValueError):  # a full disk; a log that has just been closed
            if self.file is None and (self.folder / "checkpoints").is_dir():
                files.make_folder(self.path.parent)
                self.file = files.open_log(self.path, buffering=0)
                if os.getpid() == self.owner:  # not in a forked worker, which has a copy of these lines
                    self.file.write("".join(self.early).encode(errors="replace"))
            if self.file is None:
                self.early.append(plain)
            else:
                self.file.write(plain.encode(errors="replace"))

    def __exit__(self, *_: object) -> None:
        global log
        self.write("")
        log = None
        with self.lock:
            if self.file is not None:
                self.file.close()


log: RankLog | None = None  # of the current job of this process


# --- A debugger in a process of a run. Free of torch ---

DEBUG_TIMEOUT_S = 30 * 86400.0  # timeout of collectives while debugging


# Callbacks that end any output that would overwrite the prompt, such as a progress bar.
before_prompt: dict[object, Callable[[], None]] = {}


@contextlib.contextmanager
def breakpoints() -> Iterator[None]:
    """Within the block, nothing else draws on the terminal of `breakpoint()` and `pdb.set_trace()`."""
    import pdb
    from unittest.mock import patch  # imported late, because it takes 0.1 s

    original = pdb.Pdb.interaction

    def interaction(self: pdb.Pdb, *args: Any) -> None:
        for end in list(before_prompt.values()):
            end()
        self.stdout = sys.stdout  # no longer the progress bar's
        original(self, *args)

    with patch.object(pdb.Pdb, "interaction", interaction):
        yield


# --- Tuning of processes that Lockstep started; restoring a caller's process. Free of torch ---

FAILED = "failed"  # key in the store: a rank that failed
monitor: Any = None  # the one of callbacks/hang_detector.py, from the setup of the first trainer to the end of the job
store: Any = None  # the store of torch.distributed that the processes of this attempt share (strategies/rendezvous.py)
trains = False  # whether this process writes the status of the run; false in an evaluation
is_command = False  # whether this process exists to run a command; false in a notebook or a caller of `lockstep.train`


def report_failure(rank: int) -> None:
    """Reports the failure to the other processes, which may miss it in a collective (callbacks/hang_detector.py)."""
    if store is not None:
        with contextlib.suppress(RuntimeError):  # the store's server is gone
            store.set(FAILED, str(rank))


@contextlib.contextmanager
def restore_process_state() -> Iterator[None]:
    """Restores the environment, `sys.argv`, `sys.path`, the working directory and the signal handlers afterwards."""
    from unittest.mock import patch

    argv, path = patch.object(sys, "argv", list(sys.argv)), patch.object(sys, "path", list(sys.path))
    with patch.dict(os.environ), argv, path, contextlib.chdir("."), handlers_restored():
        yield


@contextlib.contextmanager
def seeded_and_restored(seed: int | None) -> Iterator[None]:
    """Seeds Python, NumPy, and torch if it is imported, and restores their states afterwards. None: only restores.

    A data set that draws random numbers is then the same in every process and at every start, and does not change the
    network's initial weights.
    """
    import numpy as np

    torch = sys.modules.get("torch")
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        if torch:
            gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
            stack.enter_context(torch.random.fork_rng(gpus))
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            if torch:
                torch.default_generator.manual_seed(seed)
        yield


@contextlib.contextmanager
def libraries_restored() -> Iterator[None]:
    """Restores loggers, warning filters, torch's settings and random states afterwards. Imports torch."""
    import torch

    cuda: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    # Both of torch's interfaces. The older one is last, so it is restored first: it also sets the newer one's values.
    flags = [(cudnn, "deterministic"), (cudnn, "benchmark"), (cudnn.rnn, "fp32_precision"), (cudnn.conv, "fp32_precision"),
             (cuda, "fp32_precision"), (cudnn, "allow_tf32"), (cuda, "allow_tf32")]  # fmt: skip
    with logging_restored(), warnings.catch_warnings(), contextlib.ExitStack() as stack:
        stack.callback(logging.captureWarnings, warnings.showwarning.__module__ == "logging")
        for module, name in flags:
            with contextlib.suppress(RuntimeError):  # the older interface raises if the caller used the newer one
                stack.callback(setattr, module, name, getattr(module, name))
        stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.enter_context(seeded_and_restored(None))
        yield


LOGGING_STATE = ("propagate", "disabled", "level", "handlers", "filters")


@contextlib.contextmanager
def logging_restored() -> Iterator[None]:
    """Restores the loggers that exist now; those created within the block have no earlier state."""
    loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    with contextlib.ExitStack() as stack:
        stack.callback(logging.root.setLevel, logging.root.level)  # last, because it clears the caches of all loggers
        for logger in (logging.root, *loggers):
            for each in (logger, *logger.handlers):
                state = {name: copy(value) for name, value in vars(each).items() if name in LOGGING_STATE}
                stack.callback(vars(each).update, state)
        yield
