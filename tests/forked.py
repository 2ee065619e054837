"""Commands and the processes of a run, for tests: forked from one server that has imported torch and Lightning once.

In all else they are what `python <script>` starts: processes of their own with that environment, working directory, exit
code and standard streams, which can be signalled and killed. This module stands in for `subprocess` where scripts are
started. All test workers share the server.
"""

import atexit
import contextlib
import fcntl
import importlib
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, TimeoutExpired
from typing import Any

__all__ = [
    "DEVNULL",
    "HOOK",
    "PIPE",
    "STDOUT",
    "Popen",
    "TimeoutExpired",
    "call",
    "start_server",
    "until",
    "working_in",
]

ADDRESS = "TEST_FORK_SERVER"
HOOK = "TEST_HOOK"  # a file that a process runs before its script: to change what the script is about to use
START_S = 300.0  # for the imports on a busy machine


class Popen:
    """`python <script> [args]`, forked; what launch/local.py uses of subprocess.Popen."""

    def __init__(self, command: list[str], *, cwd: Any = None, env: dict[str, str] | None = None, stdin: Any = None,
                 stdout: Any = None, stderr: Any = None, start_new_session: bool = False) -> None:  # fmt: skip
        assert command[0] == sys.executable and command[1].endswith(".py"), command
        self.args, self.returncode, self.stdin, self.stdout = command, None, None, None
        request = {
            "argv": command[1:],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "group": 0 if start_new_session else os.getpgrp(),
        }
        with contextlib.ExitStack() as stack:
            given = self.descriptors(stdin, stdout, stderr, stack)
            self.connection = Client(os.environ[ADDRESS])
            self.connection.send(request)
            for descriptor in given:
                reduction.send_handle(self.connection, descriptor, None)
        self.pid: int = self.connection.recv()

    def __enter__(self) -> "Popen":
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdin:
            self.stdin.close()
        self.wait()

    def descriptors(self, stdin: Any, stdout: Any, stderr: Any, stack: contextlib.ExitStack) -> list[int]:
        found = []
        for number, wanted in enumerate((stdin, stdout, stderr)):
            if wanted is None:
                found.append(number)
            elif wanted == DEVNULL:
                found.append(stack.enter_context(Path(os.devnull).open("r+b")).fileno())
            elif wanted == STDOUT:
                found.append(found[1])
            elif wanted == PIPE:
                assert number == 0, "only standard input can be a pipe"
                read, write = os.pipe()
                stack.callback(os.close, read)
                self.stdin = os.fdopen(write, "wb", buffering=0)
                found.append(read)
            else:
                found.append(wanted.fileno())
        return found

    def poll(self) -> int | None:
        if self.returncode is None and self.connection.poll():
            self.returncode = self.connection.recv()
            self.connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not self.connection.poll(timeout):
            raise TimeoutExpired(self.args, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, what: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, what)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def call(file: str, function: str, *arguments: str) -> Popen:
    """A function of a test file, with texts as arguments."""
    return Popen([sys.executable, str(Path(__file__).with_name("called.py")), file, function, *arguments])


# --- what tests ask of processes ---


def until(true: Callable[[], Any], limit_s: float = 180, what: str = "it") -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"{what} did not come true in {limit_s:.0f} s"
        time.sleep(0.05)


def working_in(folder: Path) -> list[str]:
    """The processes whose working directory that is, in whatever session they are."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if (path / "cwd").readlink() == folder and (path / "cmdline").read_bytes():
                found.append(path.name)
    return found


# --- the server ---


def start_server(folder: Path) -> None:
    """Starts it, unless another worker has: it ends with the last worker that has called this."""
    if ADDRESS in os.environ:  # one that somebody keeps
        return
    address, log = folder / "fork-server", folder / "fork-server.log"
    with (folder / "fork-server.lock").open("w") as lock, log.open("ab") as output:
        fcntl.flock(lock, fcntl.LOCK_EX)  # not `output`, whose lock the server would keep
        worker = connected(address)
        if worker is None:
            command = [sys.executable, "-c", "import sys, forked; forked.serve(sys.argv[1])", str(address)]
            path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
            environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            server = subprocess.Popen(command, env=environment, stdin=DEVNULL, stdout=output, stderr=output,
                                      start_new_session=True)  # fmt: skip
            deadline = time.monotonic() + START_S
            while worker is None:
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
                worker = connected(address)
            server.returncode = 0  # it is not waited for
    worker.send(None)
    os.environ[ADDRESS] = str(address)
    atexit.register(worker.close)


def connected(address: Path) -> Connection | None:
    try:
        return Client(str(address))
    except (FileNotFoundError, ConnectionRefusedError):
        return None


def preload() -> None:
    import lockstep.build
    import lockstep.extras.comparison
    import lockstep.launch.start
    import lockstep.launch.sweeps
    import lockstep.reporting.page
    import lockstep.training.oom  # noqa: F401

    importlib.import_module("timm")


def serve(address: str) -> None:
    """Forks a process for each request, and tells its exit code to who asked, until no worker is connected."""
    preload()
    Path(address).unlink(missing_ok=True)  # of a server that was killed
    listener = Listener(address, backlog=64)
    awake, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    inbox: Any = listener._listener._socket  # type: ignore[attr-defined]
    children: dict[int, Connection] = {}
    workers: list[Connection] = []
    with selectors.DefaultSelector() as selector:
        for readable in (inbox, awake):
            selector.register(readable, selectors.EVENT_READ)
        begun = False
        while workers or not begun:
            for key, _ in selector.select():
                if key.fileobj is inbox:
                    connection = listener.accept()
                    try:
                        request = connection.recv()
                    except EOFError:  # who asked was killed
                        continue
                    if request is None:
                        workers.append(connection)
                        selector.register(connection, selectors.EVENT_READ)
                        begun = True
                    else:
                        ours = [inbox, awake, wake, selector, *workers, *children.values()]
                        children[fork(connection, request, ours)] = connection
                elif key.fileobj is awake:
                    awake.recv(4096)
                    reap(children)
                else:
                    selector.unregister(key.fileobj)
                    workers.remove(key.fileobj)
    listener.close()
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reap(children: dict[int, Connection]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with contextlib.suppress(OSError):  # who asked may be gone
                children[pid].send(os.waitstatus_to_exitcode(status))
            children.pop(pid).close()


def fork(connection: Connection, request: dict[str, Any], ours: list[Any]) -> int:
    streams = [reduction.recv_handle(connection) for _ in range(3)]
    if pid := os.fork():
        for descriptor in streams:
            os.close(descriptor)
        connection.send(pid)
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        for mine in [*ours, connection]:
            mine.close()
        with contextlib.suppress(
            PermissionError
        ):  # a group of pytest's session: its Ctrl-C ends pytest, and then these
            os.setpgid(0, request["group"])
        run(request)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(70)


def run(request: dict[str, Any]) -> None:
    """What Python does with a script, from its start to its exit."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[:] = request["argv"]
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(sys.argv[0]).parent), *(place for place in path if place and place not in sys.path)]
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if os.isatty(number):  # the server's own streams are files
            setattr(sys, name, open(number, mode, buffering=1, closefd=False))
            setattr(sys, f"__{name}__", getattr(sys, name))
    in_this_process()
    if HOOK in os.environ:
        runpy.run_path(os.environ[HOOK])
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def in_this_process() -> None:
    """Threads as the environment says; processes that this one starts are forked as well; kills of tests/kills.py."""
    import kills
    import torch

    from lockstep.launch import local

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    this: Any = sys.modules[__name__]
    local.subprocess = this
    if os.environ.get(kills.RANK, "") == os.environ.get("RANK"):
        kills.count_events()
