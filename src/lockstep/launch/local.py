"""The processes of this machine: one for each device, all ended when one fails or when their parent is gone.

Lightning would start them itself by repeating the command line; under a Hydra multirun that repeats the whole
sweep in each child (Lightning#11300). Here a process gets the resolved config of its job and nothing else, and
Lightning is told by LOCAL_RANK that the processes exist.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep.config import project
from lockstep.config.identity import run_dir
from lockstep.errors import OutOfMemory, RunFailed
from lockstep.launch.out_of_memory import kernel_kills, killed
from lockstep.machine import signals
from lockstep.machine.files import write_text
from lockstep.machine.world import World, cores

JOB = "LOCKSTEP_JOB"
MESSAGE = "LOCKSTEP_MESSAGE"  # the file in which a process tells its parent why it cannot go on
LAST_WORDS_S = 2.0  # after one has failed, for the others to fail by themselves: rank 0 may be writing the report
SAVING_S = (
    60.0  # the same after a warning, for rank 0 may be finishing W&B's run, and while a checkpoint is being written
)
GRACE_S = 10.0  # from being asked to end to being killed


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def processes_per_node(world: World) -> int:
    return world.size // world.nodes


def environment(cfg: DictConfig, world: World, local_rank: int, port: int) -> dict[str, str]:
    job = {
        "config": OmegaConf.to_container(cfg, resolve=True),
        "world": {**asdict(world), "rank": world.rank + local_rank},
    }
    # As many threads as cores would slow each other down. A process that is alone has as many as one that was typed.
    several = (
        {"OMP_NUM_THREADS": str(max(1, cores() // processes_per_node(world)))} if processes_per_node(world) > 1 else {}
    )
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if world.nodes == 1 else {}
    return {
        **several,
        **os.environ,
        **project.environment(),
        **here,
        "RANK": str(world.rank + local_rank),
        "LOCAL_RANK": str(local_rank),
        "NODE_RANK": str(world.rank // world.devices),
        JOB: json.dumps(job),
    }


def received_job() -> tuple[DictConfig, World] | None:
    """The job that `run_processes` gave to this process; None in a process that somebody started by hand."""
    if JOB not in os.environ:
        return None
    job: dict[str, Any] = json.loads(os.environ.pop(JOB))
    threading.Thread(target=exit_with_parent, daemon=True).start()
    return OmegaConf.create(job["config"]), World(**job["world"])


def exit_with_parent() -> None:
    """The parent never writes to our standard input: it ends when the parent does, however that happened."""
    while os.read(0, 1):
        pass
    os._exit(1)


def report_out_of_memory(call: Callable[[], None]) -> None:
    """Runs `call`. When memory runs out, the parent is told, and ends all: would this process end by itself, the others
    would fail as well, each with a traceback about a connection that is gone."""
    path = Path(os.environ.pop(MESSAGE))
    try:
        call()
    except OutOfMemory as e:
        write_text(path, json.dumps(e.args))
        time.sleep(GRACE_S)
        raise


def run_processes(script: Path, cfg: DictConfig, world: World) -> None:
    """Runs `script` once for each process of this node and waits.

    Raises:
        RunFailed: with the exit code of the first process that failed; the others have been ended.
        OutOfMemory: memory ran out in one of them.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        words = [Path(folder) / str(local_rank) for local_rank in range(processes_per_node(world))]
        kills = kernel_kills()
        code = run_and_wait(script, cfg, world, words)
        said = [OutOfMemory(*json.loads(path.read_text())) for path in words if path.exists()]
    if said:  # one that nothing helps, or else the one that needs the smallest micro-batch
        raise max(said, key=lambda e: e.accumulate or float("inf"))
    if code == -9:  # SIGKILL, which Windows does not have
        raise killed(cfg, world, by_kernel=kernel_kills() > kills, trains=script.stem != "eval")
    if code:
        raise RunFailed(f"a process of the run ended with exit code {code}", 2 if code == 2 else 1)


def run_and_wait(script: Path, cfg: DictConfig, world: World, words: Sequence[Path]) -> int:
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(cfg, world, local_rank, port) | {MESSAGE: str(path)},
            stdin=subprocess.PIPE,
            stdout=None if world.rank + local_rank == 0 else subprocess.DEVNULL,
        )
        for local_rank, path in enumerate(words)
    ]
    try:
        return wait(processes, words, run_dir(cfg) / "checkpoints")
    except KeyboardInterrupt:
        stop(processes, signal.SIGINT)
        raise
    finally:
        for process in processes:  # one has failed: the others wait for it, and a SIGTERM only asks them to save
            process.kill()
        stop(processes, signal.SIGTERM)


def wait(processes: list[subprocess.Popen[bytes]], words: Sequence[Path] = (), checkpoints: Path | None = None) -> int:
    """0 when all have ended well, else the first exit code that is not 0; the others had LAST_WORDS_S by then.
    One that has written its file of `words` waits to be ended, and counts as failed with 1.

    Warnings of the system are passed on: the processes save what they have, and end.
    """
    first, deadline, told = 0, float("inf"), 0
    while True:
        for warning in signals.received[told:]:
            send_signal(processes, warning)
            told += 1
        codes = [process.poll() for process in processes]
        waiting = sum(path.exists() for path in words)
        failed = [code for code in codes if code] or [1] * bool(waiting)
        if failed and not first:
            saving = told or (checkpoints and any(checkpoints.glob("*.part")))
            first = next((code for code in failed if code < 0), failed[0])  # a killed one is why the others fail
            deadline = time.monotonic() + (SAVING_S if saving else LAST_WORDS_S)
        if codes.count(None) == waiting or time.monotonic() > deadline:
            return first
        time.sleep(0.05)


def send_signal(processes: list[subprocess.Popen[bytes]], what: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(what)


def stop(processes: list[subprocess.Popen[bytes]], how: signal.Signals) -> None:
    send_signal(processes, how)
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
