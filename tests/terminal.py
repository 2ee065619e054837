"""A command whose standard streams are a terminal, for tests: what it prints, and what is typed into it."""

import os
import pty
import subprocess
import threading
import time
from pathlib import Path


class Terminal:
    def __init__(self, command: list[str], folder: Path, popen: type = subprocess.Popen, **environment: str) -> None:
        self.seen, self.read_to = "", 0
        self.terminal, other_end = pty.openpty()
        with os.fdopen(other_end, "r+b", buffering=0) as end:
            env = {**os.environ, "TERM": "xterm", **environment}
            streams = {"stdin": end, "stdout": end, "stderr": end}
            self.process = popen(command, cwd=folder, env=env, start_new_session=True, **streams)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        try:
            while chunk := os.read(self.terminal, 65536):
                self.seen += chunk.decode(errors="replace").replace("\r\n", "\n").replace("\a", "")
        except OSError:  # nobody has the terminal any more
            pass

    def until(self, text: str, timeout_s: float = 200) -> str:
        """What the command prints up to `text`."""
        began_s, start = time.monotonic(), self.read_to
        while (place := self.seen.find(text, start)) < 0:
            assert time.monotonic() - began_s < timeout_s, self.seen
            ended = self.process.poll() is not None
            time.sleep(1.0 if ended else 0.05)
            assert not ended or text in self.seen[start:], self.seen
        self.read_to = place + len(text)
        return self.seen[start : self.read_to]

    def enter(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)
