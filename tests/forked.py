"""The processes of a run, for tests: forked from a server that has imported everything once, 10 s once for all of them.

In all else they are what launch/local.py starts: real processes with the same environment, job and exit codes.
"""

import multiprocessing
import os
import resource
import sys
import threading
import time
from dataclasses import replace
from importlib import util
from multiprocessing.process import BaseProcess
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lockstep.errors import RunFailed
from lockstep.launch import local
from lockstep.machine.world import World

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["lockstep.build", "lockstep.reporting.recorder", "timm"])


def work(script: str, config: dict, world: World, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.environ.pop(local.JOB)
    import torch

    from lockstep.launch.exits import exit_code

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if world.rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if os.environ.get(KILL_RANK) == str(world.rank):
        count_events()
    spec = util.spec_from_file_location("job", script)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    code = exit_code(lambda: module.JOB(OmegaConf.create(config), world), world.rank)
    sys.stdout.flush()
    os._exit(code)  # as fast as it goes: nothing is left to say


def run_processes(script: Path, cfg: DictConfig, world: World) -> None:
    port, config = local.free_port(), OmegaConf.to_container(cfg, resolve=True)
    processes: list[BaseProcess] = []
    for rank in range(world.devices):
        own = replace(world, rank=rank)
        environment = local.environment(cfg, own, 0, port) | {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        environment |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world.devices))}
        processes.append(
            context.Process(target=work, args=(str(script), config, own, environment), daemon=True, name=f"rank {rank}")
        )
    for process in processes:
        process.start()
    first, deadline = 0, float("inf")
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        for process in processes:
            process.join(0.02)
            if process.exitcode and not first:
                first, deadline = process.exitcode, time.monotonic() + local.LAST_WORDS_S
    for process in processes:
        process.kill()
        process.join()
    first = first or next((process.exitcode for process in processes if process.exitcode), 0)
    if first:
        raise RunFailed(f"a process of the run ended with exit code {first}", 2 if first == 2 else 1)


# --- kills ---

KILL_AT, KILL_RANK, COUNT = "TEST_KILL_AT", "TEST_KILL_RANK", "TEST_COUNT_EVENTS"
ROOM = "TEST_ROOM"  # where it is set, the disk has no more room for larger files from that moment on, instead of a kill


def count_events() -> None:
    """Counts the moments around everything that a run writes, and kills this process at the one that is asked for."""
    import signal

    from lockstep.callbacks import FiniteLoss
    from lockstep.checkpoints import saving, shards
    from lockstep.reporting.loggers import MetricsCsv

    at, seen, one_thread = int(os.environ[KILL_AT]), [0], threading.Lock()

    def event(name: str) -> None:
        with one_thread:
            seen[0] += 1
            if COUNT in os.environ:
                with Path(os.environ[COUNT]).open("a") as file:
                    file.write(f"{name}\n")
            if seen[0] == at and ROOM in os.environ:
                resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ[ROOM]), resource.RLIM_INFINITY))
            elif seen[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)

    def around(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: object, **kwargs: object) -> object:
            event(f"before {name}")
            result = original(*args, **kwargs)
            event(f"after {name}")
            return result

        setattr(owner, name, wrapped)

    write = shards.write

    def write_in_two_parts(content: object, path: Path) -> None:
        write(content, path)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        event("half of a checkpoint is written")
        path.write_bytes(whole)

    shards.write = write_in_two_parts
    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        event("before rename")
        return rename(self, target)

    Path.rename = renamed
    around(shards, "take_place")
    around(shards, "remove")
    around(MetricsCsv, "log_metrics")
    around(MetricsCsv, "write")
    around(FiniteLoss, "on_train_batch_end")
    around(saving.LastCheckpoint, "save")
    around(saving.LastCheckpoint, "setup")
    around(saving.LastCheckpoint, "tidy")
