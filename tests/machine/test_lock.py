"""One process for each run directory, for as long as it lives."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from lockstep.errors import UserError
from lockstep.machine import files
from lockstep.reporting.recorder import status

HOLDER = """
import os, sys
from pathlib import Path
from lockstep.machine import files
files.take(Path(sys.argv[1]))
if os.fork() == 0:
    print("held", flush=True)  # by the fork, which has given up its copy by now
sys.stdin.read()  # in both: the fork, like a worker of a dataloader, may outlive its parent
"""


def test_a_lock_lives_as_long_as_its_process_and_not_as_its_forks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "RETRY_S", 0.0)
    running = {"status": "running", "host": socket.gethostname()}
    assert not files.is_taken(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdin=-1, stdout=-1) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert files.is_taken(tmp_path)
        assert status(tmp_path, running) == "running"
        for refused in (files.take, files.refuse_if_taken):
            with pytest.raises(UserError, match="another process trains there now"):
                refused(tmp_path)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(60)
        assert not files.is_taken(tmp_path)
        holder.stdin.close()  # only now the fork ends
    assert status(tmp_path, running) == "died"
    assert status(tmp_path, running | {"host": "another"}) == "running"
    files.take(tmp_path)
    assert files.is_taken(tmp_path), "in the same process too"
    files.release(tmp_path)
    assert not files.is_taken(tmp_path)


def test_file_systems_without_locks_work_without(tmp_path, monkeypatch):
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(files.fcntl, "flock", unsupported)
    files.take(tmp_path)
    assert not files.is_taken(tmp_path)
    files.release(tmp_path)
