"""The devices and memory of this machine, and the processes of a run: how torchrun and SLURM tell a process its place. Free of torch."""

import ctypes
import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.machine import process

if TYPE_CHECKING:
    import torch

# --- The devices, memory and instructions of this machine ---

BF16_ON_CPU = re.compile(r"^flags.*\b(avx512_bf16|amx_bf16)\b", re.MULTILINE)  # x86; bf16 on ARM was not measured
CPUINFO = Path("/proc/cpuinfo")
CONTAINER_LIMITS = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
AMD = Path("/dev/kfd")  # is there with AMD's driver
# How each driver counts GPUs, tells an attribute of one, and numbers the two parts of the compute capability.
CUDA = ("cuDeviceGetCount", "cuDeviceGetAttribute", 75, 76)
HIP = ("hipGetDeviceCount", "hipDeviceGetAttribute", 23, 61)
VOLTA, AMPERE = 70, 80  # the first compute capabilities with fp16 and with bf16 units


@cache
def driver() -> ctypes.CDLL | None:
    """NVIDIA's driver, or AMD's, which torch may bring. Both respect the variables that hide GPUs. None without one."""
    nvidia = "nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1"
    of_amd = ("libamdhip64.so", str(torch_folder() / "lib/libamdhip64.so")) if AMD.exists() else ()
    for name in (nvidia, *of_amd):
        with suppress(OSError):
            found = ctypes.CDLL(name)
            if (found.cuInit if name == nvidia else found.hipInit)(0) == 0:
                return found
    return None


def asked(function: str, *arguments: int) -> int:
    """The driver's answer; 0 without one."""
    call, answer = getattr(driver(), function, None), ctypes.c_int(0)
    return answer.value if call and call(ctypes.byref(answer), *arguments) == 0 else 0


@cache
def capabilities() -> list[int]:
    """The compute capability of each GPU that the driver shows to this process: 90 for an H100; of AMD's as torch has it."""
    count, of, major, minor = CUDA if asked(CUDA[0]) else HIP
    return [10 * asked(of, major, gpu) + asked(of, minor, gpu) for gpu in range(asked(count))]


# --- What the installed torch was built for, without importing it, which takes seconds ---
#
# torch 2.13 states it only after its import (`torch.version.cuda`, `torch.version.hip`). It is read from its file. None if it is not
# found: the driver is believed then.


def torch_folder() -> Path:
    found = find_spec("torch")
    return Path(found.origin).parent if found and found.origin else Path("no torch")


@cache
def version_of_torch(kind: str) -> str | None:
    """`13.0` of cuda or hip; empty for a build without."""
    file = torch_folder() / "version.py"
    found = re.search(
        rf"^{kind}\b.*= *(?:None|['\"]([\w.-]+)['\"])", file.read_text() if file.is_file() else "", re.MULTILINE
    )
    return found and (found[1] or "")


@cache
def why_no_gpu() -> str | None:
    """Why torch cannot use the GPUs that the driver shows; None if it can, or if there are none."""
    if not capabilities():
        return None
    kind, name = ("cuda", "CUDA") if asked(CUDA[0]) else ("hip", "ROCm")
    built, version = version_of_torch(kind), asked("cuDriverGetVersion")
    if built == "":
        return f"the installed torch is a build without {name}; https://pytorch.org/get-started has one with it"
    if built and kind == "cuda" and version // 1000 < int(built.partition(".")[0]):
        return (
            f"the installed torch needs a driver for CUDA {built}, and this one is for {version // 1000}.{version % 1000 // 10}; "
            "update the driver, or install a torch for an older CUDA"
        )
    return None


def multiplies_bf16(accelerator: str) -> bool:
    """Whether this machine's devices of that kind have bf16 units. Emulated bf16 is slower than float32."""
    if accelerator == "cpu":
        return CPUINFO.is_file() and BF16_ON_CPU.search(CPUINFO.read_text()) is not None
    return accelerator == "cuda" and min(capabilities(), default=0) >= AMPERE


def memory_bytes() -> int:
    """The memory of this machine, or the limit of its container."""
    if not hasattr(os, "sysconf"):  # Windows
        return 8 * 2**30
    limits = [path.read_text().strip() for path in CONTAINER_LIMITS if path.is_file()]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(int(limit) for limit in limits if limit.isdigit())])


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
NEVER, OLD_GLIBCS_MOST = 2**31 - 1, 32 * 2**20


def keep_freed_memory() -> None:
    """Makes glibc keep the memory of freed tensors for the next ones. Does nothing if the user has set a MALLOC_ variable, or in
    a caller's process.

    By default glibc returns tensors of more than 32 MiB to the system, which hands their memory out again page by page, zeroed. A step of
    BasicNet with 512 samples took 154 ms of CPU time with kept memory and 243 without; with 64 samples both are alike.

    Not for fsdp, whose gathered blocks fragment the heap: with 151 million parameters on two processes, each had 3.7 GiB after 8
    steps, still growing, against 1.7 GiB without this and with steps 10 to 20 % longer.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if process.owned and not chosen and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        if not libc.mallopt(M_MMAP_THRESHOLD, NEVER):
            libc.mallopt(M_MMAP_THRESHOLD, OLD_GLIBCS_MOST)
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)


def peak_bytes(device: "torch.device") -> int | None:
    """The most memory that this process has had so far: of its GPU if it has one, else of the host."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# --- The variables by which torchrun and SLURM tell a process its place, and whether they fit together. Free of torch ---

TORCHRUN, SLURM = "torchrun", "slurm"
# What each launcher sets together; the first one says that it started this process.
LAUNCHERS = {
    TORCHRUN: ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    SLURM: ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_JOB_ID"),
}  # fmt: skip
# A rank, the number of all, and that of equal parts: each node has the same number of processes.
PARTS = {TORCHRUN: ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), SLURM: ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NNODES")}
OTHERS = ("NODE_RANK", "TORCHELASTIC_RESTART_COUNT", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_TASKS",
          "SLURM_RESTART_COUNT", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE")  # fmt: skip
NUMBERS = [name for name in (*LAUNCHERS[TORCHRUN][1:], *LAUNCHERS[SLURM][1:], *OTHERS) if name != "MASTER_ADDR"]
# What a process that nobody else started may find: one process at place 0. SLURM's counts are those of the whole job.
ALONE = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1,
         "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0}  # fmt: skip


def number(env: Mapping[str, str], *names: str, default: int = 1) -> int:
    """The first of `names` that is set; `default` if none is, or if it is not a number (see `launcher_problems`)."""
    value = next((env[name] for name in names if name in env), "")
    return int(value) if value.isdecimal() else default


def external_launcher(env: Mapping[str, str]) -> str | None:
    """The launcher that started this process as one of several, if not Lockstep."""
    if LAUNCHERS[TORCHRUN][0] in env:
        return TORCHRUN
    # Tasks of the step; an interactive step has 1. The batch script itself has no step id.
    tasks = number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    return SLURM if tasks > 1 and LAUNCHERS[SLURM][0] in env else None


def launcher_problems(env: Mapping[str, str]) -> list[str]:
    """Why this process cannot know its place: variables that are garbage, or not of one launcher."""
    launcher = external_launcher(env)
    needed = LAUNCHERS[launcher] if launcher else ()
    missing = [name for name in needed if not env.get(name)]
    wrong = [name for name in NUMBERS if name in env and not env[name].isdecimal()]
    if wrong:
        what = ": not a whole number"
    elif launcher is None:
        wrong = [name for name, value in ALONE.items() if int(env.get(name, value)) != value]
        what = (
            " says that this process is one of several, but neither torchrun (TORCHELASTIC_RUN_ID) nor a step of SLURM "
        )
        what += "(SLURM_STEP_ID and SLURM_NTASKS) started it"
    elif missing:
        wrong = [name for name in needed if env.get(name)]
        what = f": {launcher} also sets {', '.join(missing)}, which is missing"
    else:
        rank, size, part = (int(env.get(name, "1")) for name in PARTS[launcher])
        wrong = [name for name in PARTS[launcher] if name in env] if rank >= size or not part or size % part else []
        what = " contradict each other"
    if not wrong:
        return []
    # A launcher's variables go together: without one of them the others are refused.
    unset = {*wrong}.union(*(names for names in LAUNCHERS.values() if {*names} & {*wrong, *missing})) & env.keys()
    given = ", ".join(f"{name}={env[name]}" for name in wrong)
    return [
        f"{given} in the environment{what}. If they are left over from another job, run unset {' '.join(sorted(unset))}, then the "
        "command again."
    ]


# --- The processes and devices of a run. Free of torch ---


@dataclass(frozen=True)
class StrategySpec:
    """What the launch and the rules of a config ask of a strategy, before torch is imported. The default is that of DDP."""

    one_process: bool = False  # for all devices; otherwise one process for each
    splits_batches: bool = False  # among the GPUs of its process
    is_sharded: bool = False  # parameters, gradients and the optimizer's state
    precisions: tuple[str, ...] | None = None  # None: all
    adds_in_fixed_order: bool = True  # in the order of a tree, so a step has the same bits on any number of processes


SPECS = {  # by the `_target_` of the strategy; any other one is unknown, and taken to be like DDP
    "lockstep.strategies.DDP": StrategySpec(),
    "lockstep.strategies.SingleDevice": StrategySpec(one_process=True),
    "lockstep.strategies.DataParallel": StrategySpec(one_process=True, splits_batches=True),
    "lockstep.strategies.FSDP2": StrategySpec(
        is_sharded=True, precisions=("32-true", "bf16-mixed", "bf16-true", "16-true")
    ),
}


def spec_of(strategy: str) -> StrategySpec:
    return SPECS.get(strategy, StrategySpec(adds_in_fixed_order=False))


@dataclass(frozen=True)
class World:
    """The processes of a run and their devices."""

    accelerator: str  # cpu | cuda | mps
    devices: int  # per node
    nodes: int
    strategy: str
    rank: int = 0
    external: str | None = None  # the launcher that started the processes, if not Lockstep: torchrun or slurm
    one_process: bool = False  # of its StrategySpec

    @property
    def size(self) -> int:
        """Number of processes."""
        return 1 if self.one_process else self.devices * self.nodes


def gpu_count() -> int:
    """GPUs that this process may use, and that the installed torch can use."""
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


def objects_of_all(value: Any) -> list[Any]:
    """The objects of all processes of a run by rank, where `value` is this one's; called on every rank. Imports torch."""
    import torch

    dist: Any = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def device_count(devices: int | str | list[int], accelerator: str, *, one_device: bool) -> int:
    """`trainer.devices` as a number: auto, -1, a number, or a list of device ids."""
    if devices == "auto":
        return 1 if one_device else available(accelerator) or 1
    if isinstance(devices, int) or (isinstance(devices, str) and "," not in devices):
        return int(devices) if int(devices) != -1 else available(accelerator) or 1
    ids = devices.split(",") if isinstance(devices, str) else devices
    return len([each for each in ids if str(each).strip()])
