"""A SLURM of two nodes on this machine: munged, slurmctld and two slurmd from Debian's packages, in a folder of their own."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from forked import until

from lockstep.launch.local import reserve_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
NODES = ("n1", "n2")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MessageTimeout=10
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=1000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no SLURM here; None when there can."""
    absent = [name for name in PROGRAMS if not shutil.which(name, path=SEARCH)]
    if absent:
        return f"{', '.join(absent)} not installed (bash scripts/install_test_systems.sh)"
    return None if os.geteuid() == 0 else "slurmd starts jobs for other users and must be root"


SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@dataclass
class Cluster:
    folder: Path
    daemons: dict[str, subprocess.Popen] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """For the clients. Nodes are found by name on a real cluster; these two have none but their machine's."""
        return {**os.environ, "PATH": SEARCH, "SLURM_CONF": str(self.folder / "slurm.conf"), "MASTER_ADDR": "127.0.0.1"}

    def start(self) -> None:
        with contextlib.ExitStack() as held:
            ports = [held.enter_context(reserve_port()) for _ in range(3)]
        conf = CONF.format(host=socket.gethostname(), ports=ports, folder=self.folder)
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("pid", "log", "seed")]
        options = [f"--key-file={key}", f"--socket={self.folder}/munge.socket", *files]
        self.daemon("munged", "--foreground", "--force", *options)
        until((self.folder / "munge.socket").exists, 20, "munged's socket")
        self.daemon("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        until(lambda: self.states() == dict.fromkeys(NODES, "idle"), 60, "two idle nodes")

    def start_node(self, node: str) -> None:
        self.daemon("slurmd", "-D", "-N", node, name=node)

    def daemon(self, program: str, *args: str, name: str | None = None) -> None:
        command = [str(shutil.which(program, path=SEARCH)), *args]
        with (self.folder / f"{name or program}.log").open("ab") as log:
            self.daemons[name or program] = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.env, start_new_session=True
            )

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def states(self) -> dict[str, str]:
        lines = self.run("sinfo", "-N", "-h", "-o", "%N %T", check=False).split("\n")
        return dict(line.split() for line in lines if line)

    def job(self, job_id: str) -> dict[str, str]:
        """What scontrol says of a job, by key."""
        text = self.run("scontrol", "-o", "show", "job", job_id)
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    def kill_node(self, node: str) -> None:
        """As when a machine loses power: its daemon and all that it started are gone at once."""
        daemon = self.daemons[node]
        for pid in [daemon.pid, *started_by(node)]:
            kill(pid)
        daemon.wait()

    def stop(self) -> None:
        self.run("scancel", "--signal=KILL", "--full", "-u", "root", check=False)
        for name, daemon in reversed(self.daemons.items()):
            for pid in started_by(name):
                kill(pid)
            daemon.terminate()
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def started_by(node: str) -> list[int]:
    """Tasks know their node by SLURMD_NODENAME; their parents are the steps' daemons."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"SLURMD_NODENAME={node}".encode() in (path / "environ").read_bytes().split(b"\0"):
                parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if b"slurmstepd" in Path(f"/proc/{parent}/cmdline").read_bytes():
                    found.append(parent)
                found.append(int(path.name))
    return found
