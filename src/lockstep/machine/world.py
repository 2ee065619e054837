"""The processes and devices of a run. Free of torch."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from omegaconf import DictConfig

from lockstep.machine.hardware import capabilities, why_no_gpu
from lockstep.machine.launchers import external_launcher, number


@dataclass(frozen=True)
class World:
    """The processes of a run and their devices."""

    accelerator: str  # cpu | cuda | mps
    devices: int  # per node
    nodes: int
    strategy: str
    rank: int = 0
    external: str | None = None  # the launcher that started the processes, if not Lockstep: torchrun or slurm
    one_process: bool = False  # a trait of the strategy

    @property
    def size(self) -> int:
        """Number of processes."""
        return 1 if self.one_process else self.devices * self.nodes


def gpu_count() -> int:
    """CUDA GPUs that this process may use, and that the installed torch can use."""
    return 0 if why_no_gpu() else len(capabilities())


def cores() -> int:
    """Cores that this process may use; SLURM and containers limit them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(world: "World", env: Mapping[str, str] = os.environ) -> int | None:
    """Threads of each CPU process that an external launcher started, so that they share the cores; None: leave as it is.

    By default torchrun gives each process one thread, however many cores there are.
    """
    if world.external == "torchrun" and world.devices > 1 and env.get("OMP_NUM_THREADS") == "1":
        return max(1, cores() // world.devices)
    if world.external == "slurm" and "OMP_NUM_THREADS" not in env:
        own = env.get("SLURM_CPUS_PER_TASK")
        job = int(env.get("SLURM_CPUS_ON_NODE", os.cpu_count() or 1))
        bound = cores() < job  # limited to its own cores; otherwise each task sees all
        return int(own) if own else cores() if bound else max(1, min(cores(), job) // world.devices)
    return None


def visible_gpus() -> list[str]:
    """The names that CUDA_VISIBLE_DEVICES has for the GPUs of this process."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[: gpu_count()] if given else [str(i) for i in range(gpu_count())]


def accelerator_of(given: str) -> str:
    """`trainer.accelerator` with `auto` and `gpu` resolved: cuda, mps or cpu."""
    apple = platform.system() == "Darwin" and platform.machine() == "arm64"
    if given in ("auto", "gpu"):
        return "cuda" if gpu_count() else "mps" if apple else "cuda" if given == "gpu" else "cpu"
    return given


def available(accelerator: str) -> int | None:
    """Devices of this machine; None without a limit, as for CPU processes."""
    return {"cuda": gpu_count(), "mps": 1}.get(accelerator)


def rank_of(env: Mapping[str, str] = os.environ) -> int:
    """This process's rank, known before the config; 0 if it is the only process."""
    return number(env, "SLURM_PROCID" if external_launcher(env) == "slurm" else "RANK", default=0)


def device_count(devices: int | str | list[int], accelerator: str, *, one_device: bool) -> int:
    """`trainer.devices` as a number: auto, -1, a number, or a list of device ids."""
    if devices == "auto":
        return 1 if one_device else available(accelerator) or 1
    if isinstance(devices, str):
        ids = [part for part in devices.split(",") if part.strip()]
        devices = int(devices) if len(ids) == 1 and "," not in devices else [int(part) for part in ids]
    if isinstance(devices, int):
        return available(accelerator) or 1 if devices == -1 else devices
    return len(devices)


def world_of(cfg: DictConfig, env: Mapping[str, str] = os.environ) -> World:
    """The world that a config asks for; under torchrun and SLURM, the one that they started."""
    strategy, traits = str(cfg.strategy.name), cfg.strategy.traits
    one_process = not traits.several_processes
    accelerator = accelerator_of(str(cfg.trainer.accelerator))
    devices = device_count(cfg.trainer.devices, accelerator, one_device=one_process and not traits.splits_batches)
    nodes = int(cfg.trainer.num_nodes)
    external = external_launcher(env)
    if external == "torchrun":
        local, size = int(env["LOCAL_WORLD_SIZE"]), int(env["WORLD_SIZE"])
        return World(accelerator, local, size // local, strategy, int(env["RANK"]), external, one_process)
    if external == "slurm":
        nodes = number(env, "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
        tasks, rank = int(env["SLURM_NTASKS"]) // nodes, int(env["SLURM_PROCID"])
        return World(accelerator, tasks, nodes, strategy, rank, external, one_process)
    node_rank = int(env.get("NODE_RANK", "0"))
    return World(accelerator, devices, nodes, strategy, node_rank * devices, None, one_process)
