"""A process of a run: its tuning, its signals, its standard output and error. Free of torch."""

import codecs
import contextlib
import inspect
import io
import locale
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
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from lockstep.errors import Interrupted, Preempted
from lockstep.machine import files

# --- Signals that warn of the end of a process. Free of torch ---
#
# Kubernetes, spot machines, scancel, and torchrun when it restarts its workers send SIGTERM. SLURM sends SIGUSR1 or SIGUSR2 before a
# time limit or a preemption, if `--signal` asks for it. A terminal that closes sends SIGHUP. Ctrl-C sends SIGINT: once is a warning,
# twice ends the run. With several processes the terminal sends it to all of them, and the process that started them handles the second one.

WINDOWS = sys.platform == "win32"
REQUEUE = () if WINDOWS else (signal.SIGUSR1, signal.SIGUSR2)
WARNINGS = (signal.SIGTERM, *REQUEUE) if WINDOWS else (signal.SIGTERM, signal.SIGHUP, *REQUEUE)
SYSTEM = (signal.SIGTERM, *REQUEUE)  # SLURM ends a job that got one of these

END_S = 120.0  # wait so long for SLURM: it ends a requeued job at once, a warned one after KillWait or GraceTime

Handler = Callable[[int, FrameType | None], None]
received: list[signal.Signals] = []
supervised = False  # whether Lockstep's launcher started this process, and passes on its own signals
debug_rank: int | None = None  # the rank that has the terminal, for a debugger: no time limits, no dry run, no bar
before: dict[signal.Signals, Any] = {}  # the handlers of REQUEUE that a run found, such as submitit's


def on_signal(number: int, _: FrameType | None) -> None:
    warning = signal.Signals(number)
    received.append(warning)
    if debug_rank is not None:  # the debugger's prompt would wait forever; pdb catches KeyboardInterrupt
        kind = Interrupted if warning is signal.SIGINT else Preempted
        raise kind(f"ended by {warning.name} during debugging; nothing was saved.")


def on_interrupt(number: int, frame: FrameType | None) -> None:
    """Notes each Ctrl-C, which those who wait for processes pass on; the second one raises KeyboardInterrupt as well."""
    is_second = signal.SIGINT in received
    on_signal(number, frame)
    if is_second:
        signal.default_int_handler(number, frame)
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
        for number, handler in (*((warning, on_signal) for warning in WARNINGS), (signal.SIGINT, interrupt)):
            if handler and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)


@contextlib.contextmanager
def handlers_restored() -> Iterator[None]:
    """Restores the signal handlers afterwards. Only the main thread can have changed them."""
    main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()} if main_thread else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:  # None: not set from Python
                signal.signal(number, handler)


@contextlib.contextmanager
def noted(*, interrupt: Handler | None = None) -> Iterator[None]:
    """Within this context, a warning does not end the process but is noted in `received`; `interrupt` handles Ctrl-C."""
    received.clear()
    before.update({warning: signal.getsignal(warning) for warning in REQUEUE})
    with handlers_restored():
        install(interrupt=interrupt)
        yield


def requeue(rank: int, env: Mapping[str, str] = os.environ) -> None:
    """Requeues this SLURM job if SLURM warned of its time limit. Called when everything is saved.

    Rank 0 does it, and all ranks wait for SLURM to end them: a rank that ends earlier could end the job, and a preempted job that
    ends by itself counts as failed. submitit has its own handler, which counts the time limits.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in env  # it restarts its workers
    if by_torchrun or "SLURM_JOB_ID" not in env or not set(received) & set(SYSTEM):
        return
    warning = next((each for each in received if each in REQUEUE), None)
    if warning and rank == 0 and callable(handler := before.get(warning)):
        handler(warning, None)
    elif warning and rank == 0:
        job = env["SLURM_JOB_ID"]
        if "SLURM_ARRAY_JOB_ID" in env:  # one task's SLURM_JOB_ID is that of the whole array
            job = f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
        print(f"{warning.name}: everything is saved; job {job} is requeued", file=sys.stderr, flush=True)
        subprocess.run(["scontrol", "requeue", job], check=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(END_S)


# --- The end of a process ---

LOOK_S = 1.0  # seconds between two looks for the parent process


def exit_process(code: int) -> NoReturn:
    """Ends the process without Python's shutdown. During shutdown, gloo threads that release tensors need the GIL and abort the
    process ("terminate called without an active exception"), even after a run that was done."""
    for stream in (sys.stdout, sys.stderr):  # which never raise, see below
        stream.flush()
    os._exit(code)


class LastOfAll:
    """Registered with atexit, ends the process with `ended[0]` after all exit handlers, whenever they were registered.

    A handler of our own would come before those that were there already: here Python lets go of the handlers it has called.
    """

    def __init__(self, ended: list[int]) -> None:
        self.ended = ended

    def __call__(self) -> None:
        """Nothing yet."""

    def __del__(self) -> None:
        if self.ended:
            exit_process(self.ended[0])


def end_with_parent(*, has_pipe: bool, message: str = "") -> None:
    """Ends this process soon after its parent, in whatever way that ended.

    `has_pipe`: standard input is a pipe to which the parent never writes, so it closes with the parent. Otherwise it may be a terminal.
    """
    parent = os.getppid()

    def wait() -> None:
        while os.read(0, 1) if has_pipe else os.getppid() == parent:
            time.sleep(LOOK_S)
        if message:
            print(message, file=sys.stderr, flush=True)
        os._exit(1)  # at once: standard output may be stuck

    threading.Thread(target=wait, daemon=True).start()


# --- Standard output and error of a process of a run. Free of torch ---
#
# A stream may be closed (`>&-`), full (`>/dev/full`), without a reader (`| head -1`), on a terminal that is gone, or ASCII only. What
# it cannot take is dropped, and training continues: the logs have the same lines.

from_notebook = False  # whether a notebook's kernel started this process
ESCAPES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|\x1b\]8;[^\x1b]*\x1b\\|\r")  # and rich's links
BAR = re.compile(r"(?<![^ \n])[\u2501\u2578\u257a]{8,}[ \n]")  # rich's progress bar, the last that it draws


class Stream(io.TextIOWrapper):
    """Standard output or error that never raises, and writes a copy to the rank's log."""

    def write(self, text: str) -> int:
        if log is not None:
            log.write(text)
        try:
            super().write(text)
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
    return from_notebook or type(sys.stdout).__module__.startswith("ipykernel.")


def discard(descriptor: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    os.set_inheritable(descriptor, True)  # if it was closed, the null device was opened under its number


def secure() -> None:
    """For a process that runs a command, not for one that calls `lockstep.train`."""
    if codecs.lookup(locale.getpreferredencoding(False)).name == "ascii":  # LC_ALL=C; the files of a run are UTF-8
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # closed: a file that is opened later would take its number, and its output
            discard(descriptor)
            setattr(sys, name, Stream(open(descriptor, "wb", closefd=False), "utf-8", "replace"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            lines, through = stream.line_buffering, stream.write_through
            setattr(sys, name, Stream(stream.buffer, stream.encoding, "replace", None, lines, through))


class RankLog:
    """What this process prints, in `logs/rank-<n>.log` of its run. Kept in memory until the run has its folder, after the dry run."""

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
        if bar := BAR.search(plain):
            plain = plain[: plain.rfind("\n", 0, bar.start()) + 1]
        with self.lock, contextlib.suppress(OSError, ValueError):  # the disk is full; the log has just been closed
            if self.file is None and (self.folder / "checkpoints").is_dir():
                files.make_folder(self.path.parent)
                self.file = files.open_log(self.path, buffering=0)
                if os.getpid() == self.owner:  # not in a worker, which was forked with a copy of them
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


log: RankLog | None = None  # of the job that this process runs now


# --- A debugger in a process of a run. Free of torch ---

DEBUG_TIMEOUT_S = 30 * 86400.0  # of collectives


notice: str | None = None  # what the debugger says before its next prompt
before_prompt: dict[object, Callable[[], None]] = {}  # ends what would overwrite the prompt, such as a progress bar


@contextlib.contextmanager
def breakpoints() -> Iterator[None]:
    """Within, `breakpoint()` and `pdb.set_trace()` have a terminal that nothing else draws on."""
    import pdb
    from unittest.mock import patch  # late, because it takes 0.1 s

    original = pdb.Pdb.set_trace

    def set_trace(self: pdb.Pdb, frame: FrameType | None = None, **options: Any) -> None:
        for end in list(before_prompt.values()):
            end()
        self.stdout = sys.stdout  # no longer the progress bar's
        if notice:
            self.message(notice)
        here = inspect.currentframe()
        original(self, frame or (here and here.f_back), **options)

    with patch.object(pdb.Pdb, "set_trace", set_trace):
        yield


# --- Tunes processes that Lockstep started; restores a caller's process. Free of torch ---

FAILED = "failed"  # in the store: a rank that has ended in failure
monitor: Any = None  # of callbacks/hang_detector.py, from the setup of the first trainer to the end of the job
store: Any = None  # of torch.distributed, which the processes of this attempt share (strategies/rendezvous.py)
trains = False  # whether the status of the run is this process's to write; not in an evaluation of the run
owned = False  # whether this process exists to run a command; not in a notebook or a caller of `lockstep.train`


def report_failure(rank: int) -> None:
    """Tells the other processes, which may not notice it in a collective (callbacks/hang_detector.py)."""
    if store is not None:
        with contextlib.suppress(RuntimeError):  # its server is gone
            store.set(FAILED, str(rank))


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restores the environment, the arguments, the import path, the working directory and signal handlers afterwards."""
    from unittest.mock import patch

    argv, path = patch.object(sys, "argv", list(sys.argv)), patch.object(sys, "path", list(sys.path))
    with patch.dict(os.environ), argv, path, contextlib.chdir("."), handlers_restored():
        yield


@contextlib.contextmanager
def libraries_restored() -> Iterator[None]:
    """Restores loggers, warning filters, torch's settings and random states afterwards. Imports torch."""
    import numpy as np
    import torch

    cuda: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    threads = torch.get_num_threads()
    # Both of torch's interfaces, the older one last, so it is restored first: it also sets the newer one's values.
    flags = [(cudnn, "deterministic"), (cudnn, "benchmark"), (cudnn.rnn, "fp32_precision"), (cudnn.conv, "fp32_precision"),
             (cuda, "fp32_precision"), (cudnn, "allow_tf32"), (cuda, "allow_tf32")]  # fmt: skip
    with logging_restored(), warnings.catch_warnings(), contextlib.ExitStack() as after:
        after.callback(logging.captureWarnings, warnings.showwarning.__module__ == "logging")
        for place, name in flags:
            with contextlib.suppress(RuntimeError):  # the caller has used the newer interface, so the older one refuses
                after.callback(setattr, place, name, getattr(place, name))
        only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
        deterministic = torch.are_deterministic_algorithms_enabled()
        after.callback(torch.use_deterministic_algorithms, deterministic, warn_only=only_warn)
        after.callback(lambda: torch.set_num_threads(threads) if torch.get_num_threads() != threads else None)
        gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
        after.enter_context(torch.random.fork_rng(gpus))
        after.callback(np.random.set_state, np.random.get_state())
        after.callback(random.setstate, random.getstate())
        yield


@contextlib.contextmanager
def logging_restored() -> Iterator[None]:
    """Restores existing loggers; those created meanwhile have no earlier state."""
    known = [x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger)]
    with contextlib.ExitStack() as after:
        after.callback(logging.root.setLevel, logging.root.level)  # last, because it clears the caches of all loggers
        for x in (logging.root, *known):
            attributes = {"propagate": x.propagate, "disabled": x.disabled, "handlers": list(x.handlers)}
            after.callback(vars(x).update, attributes, level=x.level, filters=list(x.filters))
            for handler in x.handlers:
                after.callback(vars(handler).update, level=handler.level, filters=list(handler.filters))
        yield
