"""Simulates hosts with separate addresses on one machine: network namespaces on a bridge. Needs Linux, root and iproute2."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from measuring import start_command


def missing() -> str | None:
    """Why hosts cannot be created here; None if they can."""
    if not shutil.which("ip"):
        return "iproute2 is not installed (bash scripts/install_test_systems.sh)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    trial = subprocess.run(["ip", "netns", "add", f"lockstep{os.getpid()}"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", f"lockstep{os.getpid()}"], capture_output=True)
    return trial.stderr.strip() or None


def ip(*args: str) -> str:
    return subprocess.run(["ip", *args], check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Host:
    name: str  # name of the namespace
    address: str
    link: str  # the bridge's end of the host's cable

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path) -> "subprocess.Popen[bytes]":
        """Starts a command on this host. gloo would find its interface by the hostname, which all hosts share, so it is set here."""
        environment = {**os.environ, **env, "GLOO_SOCKET_IFNAME": "eth0"}
        return start_command(["ip", "netns", "exec", self.name, *command], log, cwd=cwd, env=environment)

    def pids(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """Kills all processes of the host at once. The kernel closes their connections, so their peers notice."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut_off(self) -> None:
        """Pulls the cable: the other hosts are not notified."""
        ip("link", "set", self.link, "down")

    def connect(self) -> None:
        ip("link", "set", self.link, "up")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Creates `count` connected hosts. Removes them and kills all their processes at the end."""
    prefix, bridge = f"ls{os.getpid() % 100000}", f"lsbr{os.getpid() % 100000}"
    created: list[Host] = []
    ip("link", "add", bridge, "type", "bridge")
    try:
        ip("link", "set", bridge, "up")
        for number in range(1, count + 1):
            host = Host(f"{prefix}n{number}", f"10.77.0.{number}", f"{prefix}v{number}")
            ip("netns", "add", host.name)
            created.append(host)
            ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            ip("link", "set", host.link, "master", bridge, "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", host.name, "link", "set", link, "up")
        yield created
    finally:
        for host in created:
            host.kill()
            ip("netns", "del", host.name)
        ip("link", "del", bridge)
