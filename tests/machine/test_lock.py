"""One process for each run directory, for as long as it lives."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from lockstep.errors import UserError
from lockstep.machine import lock
from lockstep.reporting.report_file import status

HOLDER = """
import os, sys
from pathlib import Path
from lockstep.machine import lock
lock.take(Path(sys.argv[1]))
if os.fork() == 0:
    print("held", flush=True)  # by the fork, which has given up its copy by now
sys.stdin.read()  # in both: the fork, like a worker of a dataloader, may outlive its parent
"""


def test_a_lock_lives_as_long_as_its_process_and_not_as_its_forks(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "RETRY_S", 0.0)
    running = {"status": "running", "host": socket.gethostname()}
    assert not lock.is_taken(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdin=-1, stdout=-1) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert lock.is_taken(tmp_path)
        assert status(tmp_path, running) == "running"
        for refused in (lock.take, lock.refuse_if_taken):
            with pytest.raises(UserError, match="another process trains there now"):
                refused(tmp_path)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(60)
        assert not lock.is_taken(tmp_path)
        holder.stdin.close()  # only now the fork ends
    assert status(tmp_path, running) == "died"
    assert status(tmp_path, running | {"host": "another"}) == "running"
    lock.take(tmp_path)
    assert lock.is_taken(tmp_path), "in the same process too"
    lock.release(tmp_path)
    assert not lock.is_taken(tmp_path)


def test_file_systems_without_locks_work_without(tmp_path, monkeypatch):
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    lock.take(tmp_path)
    assert not lock.is_taken(tmp_path)
    lock.release(tmp_path)
