"""Commands and the processes of a run, for tests: forked from one server that has imported torch and Lightning once.

In all else they are what `python <script>` starts: processes of their own with that environment, working directory, exit
code and standard streams, which can be signalled and killed. This module stands in for `subprocess` where scripts are
started. All test workers share the server.

python forked.py <file> <function> [argument ...]     # a function of a test file in a process of its own, see `call`
"""

import atexit
import contextlib
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, TimeoutExpired
from typing import Any

ADDRESS = "TEST_FORK_SERVER"
HOOK = "TEST_HOOK"  # a file that a process runs before its script: to change what the script is about to use


class Popen(subprocess.Popen):
    """`python <script> [args]`, forked; what launch/local.py uses of subprocess.Popen, whose constructor does not run."""

    _sigint_wait_secs = 0.0  # for the end of a with statement after Ctrl-C

    def __init__(self, command: list[str], *, cwd: Any = None, env: dict[str, str] | None = None, stdin: Any = None,
                 stdout: Any = None, stderr: Any = None, start_new_session: bool = False) -> None:  # fmt: skip
        assert command[0] == sys.executable and command[1].endswith(".py"), command
        self.args, self.returncode, self.stdin, self.stdout, self.stderr = command, None, None, None, None
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


def call(file: str, function: str, *arguments: str) -> Popen:
    """A function of a test file, with texts as arguments."""
    return Popen([sys.executable, __file__, file, function, *arguments])


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
    """Starts it, unless somebody keeps one. It ends with this process, whose pipe its standard input is."""
    if ADDRESS in os.environ:
        return
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    with socket.socket(socket.AF_UNIX) as inbox:
        inbox.bind(str(folder / "fork-server"))
        inbox.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-c", "import sys, forked; forked.serve(int(sys.argv[1]))", str(inbox.fileno())],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            pass_fds=[inbox.fileno()], stdin=PIPE, stdout=DEVNULL, start_new_session=True,
        )  # fmt: skip
    os.environ[ADDRESS] = str(folder / "fork-server")
    atexit.register(server.communicate)


def preload() -> None:
    import lockstep.build
    import lockstep.extras.comparison
    import lockstep.extras.page
    import lockstep.launch.start
    import lockstep.launch.sweeps
    import lockstep.training.oom  # noqa: F401

    importlib.import_module("timm")


def serve(descriptor: int) -> None:
    """Forks a process for each request, and sends its exit code to the one that asked, until standard input ends."""
    inbox = socket.socket(fileno=descriptor)
    children: dict[int, tuple[int, Connection]] = {}  # by a descriptor that is readable when the process has ended
    while True:
        for ready in wait([0, inbox, *children]):
            if ready == 0:
                for pid, _ in children.values():
                    os.kill(pid, signal.SIGKILL)
                return
            if ready is inbox:
                connection = Connection(inbox.accept()[0].detach())
                with contextlib.suppress(EOFError):  # the one that asked was killed
                    request = connection.recv()
                    preload()  # at the first request; what is imported stays
                    pid = fork(connection, request, inbox, children)
                    children[os.pidfd_open(pid)] = pid, connection
            else:
                pid, connection = children.pop(ready)
                os.close(ready)
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError), connection:  # the one that asked may be gone
                    connection.send(os.waitstatus_to_exitcode(status))


def fork(
    connection: Connection,
    request: dict[str, Any],
    inbox: socket.socket,
    children: dict[int, tuple[int, Connection]],
) -> int:
    streams = [reduction.recv_handle(connection) for _ in range(3)]
    if pid := os.fork():
        for descriptor in streams:
            os.close(descriptor)
        connection.send(pid)
        return pid
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        for descriptor, (_, other) in children.items():
            os.close(descriptor)
            other.close()
        connection.close()
        inbox.close()
        # A group of pytest's session: its Ctrl-C ends pytest, and then these.
        with contextlib.suppress(PermissionError):
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


if __name__ == "__main__":
    runpy.run_path(sys.argv[1])[sys.argv[2]](*sys.argv[3:])
