"""Devices and memory of this machine; processes of a run, from the variables of torchrun and SLURM. Free of torch."""

import ctypes
import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lockstep.machine import process
from lockstep.machine.system import HAS_MPS, WINDOWS, cores, glibc, resident_peak_bytes

if TYPE_CHECKING:
    import torch

# --- The devices, memory and instructions of this machine ---

BF16_ON_CPU = re.compile(r"^flags.*\b(avx512_bf16|amx_bf16)\b", re.MULTILINE)  # x86; bf16 on ARM was not measured
CPUINFO = Path("/proc/cpuinfo")
AMD = Path("/dev/kfd")  # exists if AMD's driver is installed
# Each driver's functions that return the number of GPUs and an attribute of a GPU, and its numbers for the attributes
# "compute capability, major" and "minor".
CUDA = ("cuDeviceGetCount", "cuDeviceGetAttribute", 75, 76)
HIP = ("hipGetDeviceCount", "hipDeviceGetAttribute", 23, 61)
VOLTA, AMPERE = 70, 80  # the first compute capabilities with fp16 and with bf16 units


@cache
def driver() -> ctypes.CDLL | None:
    """NVIDIA's driver, or AMD's, which torch may bundle; None without. Both respect the variables that hide GPUs."""
    nvidia = "nvcuda.dll" if WINDOWS else "libcuda.so.1"
    amd = ("libamdhip64.so", str(torch_folder() / "lib/libamdhip64.so")) if AMD.exists() else ()
    for name in (nvidia, *amd):
        with suppress(OSError):
            library = ctypes.CDLL(name)
            if (library.cuInit if name == nvidia else library.hipInit)(0) == 0:
                return library
    return None


def query_driver(function: str, *arguments: int) -> int:
    """The result of a function of the driver; 0 without a driver or on an error."""
    call, answer = getattr(driver(), function, None), ctypes.c_int(0)
    return answer.value if call and call(ctypes.byref(answer), *arguments) == 0 else 0


@cache
def capabilities() -> list[int]:
    """Compute capabilities of the GPUs visible to this process: 90 for an H100; for AMD, the value as in torch."""
    count, attribute, major, minor = CUDA if query_driver(CUDA[0]) else HIP
    gpus = range(query_driver(count))
    return [10 * query_driver(attribute, major, gpu) + query_driver(attribute, minor, gpu) for gpu in gpus]


# --- What the installed torch was built for, without importing it, which takes seconds ---
#
# torch 2.13 reports it only after its import (`torch.version.cuda`, `torch.version.hip`), so it is read from
# torch/version.py. If it is not found there (None), the driver alone decides.


def torch_folder() -> Path:
    spec = find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else Path("no torch")


@cache
def version_of_torch(kind: str) -> str | None:
    """The version of `kind` (cuda, hip) that torch was built for, e.g. `13.0`; empty: without it; None: unknown."""
    file = torch_folder() / "version.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    match = re.search(rf"^{kind}\b.*= *(?:None|['\"]([\w.-]+)['\"])", text, re.MULTILINE)
    return match and (match[1] or "")


@cache
def why_no_gpu() -> str | None:
    """Why torch cannot use the visible GPUs; None if it can, or if there are none."""
    if not capabilities():
        return None
    kind = "cuda" if query_driver(CUDA[0]) else "hip"
    built_for = version_of_torch(kind)
    if built_for == "":
        return f"the installed torch was built without {kind.upper()}; see https://pytorch.org/get-started"
    if built_for and kind == "cuda" and query_driver("cuDriverGetVersion") // 1000 < int(built_for.partition(".")[0]):
        return f"the installed torch needs a driver for CUDA {built_for}; update the driver, or install a different torch build"
    return None


def has_bf16_units(accelerator: str) -> bool:
    """Whether the devices of that kind have bf16 units. Emulated bf16 is slower than float32."""
    if accelerator == "cpu":
        return CPUINFO.is_file() and BF16_ON_CPU.search(CPUINFO.read_text(encoding="utf-8")) is not None
    return accelerator == "cuda" and min(capabilities(), default=0) >= AMPERE


def fastest_precision(accelerator: str, supported: Sequence[str] | None) -> str:
    """The fastest mixed precision with hardware units. `supported` by the strategy; None means all."""
    if has_bf16_units(accelerator):
        return "bf16-mixed"
    has_fp16 = accelerator == "cuda" and min(capabilities(), default=0) >= VOLTA
    return "16-mixed" if has_fp16 and "16-mixed" in (supported or ["16-mixed"]) else "32-true"


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
NEVER, OLD_GLIBCS_MOST = 2**31 - 1, 32 * 2**20


def keep_freed_memory(accelerator: str, *, is_sharded: bool) -> None:
    """Makes glibc keep the memory of freed tensors for the next ones, in a run on CPUs.

    Does nothing in a caller's process, or if the user has set a MALLOC_ variable. Call it before the data is read: the
    default recipe ran at 5,089 images/s, and at 4,924 with a call afterwards (medians of 12 runs in turns, two threads).

    By default glibc returns tensors of more than 32 MiB to the system, which hands their memory out again page by page,
    zeroed. A step of BasicNet with 512 samples took 154 ms of CPU time with kept memory and 243 ms without. With 64
    samples there was no difference.

    Not for fsdp, whose gathered blocks fragment the heap: with 151 million parameters on two processes, each process
    had 3.7 GiB after 8 steps, still growing, against 1.7 GiB without this function, where steps were 10 to 20% longer.
    """
    applies = accelerator == "cpu" and not is_sharded and process.is_command
    set_by_user = any(name.startswith("MALLOC_") for name in os.environ)
    if applies and not set_by_user and (libc := glibc()):
        if not libc.mallopt(M_MMAP_THRESHOLD, NEVER):
            libc.mallopt(M_MMAP_THRESHOLD, OLD_GLIBCS_MOST)
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)


def peak_bytes(device: "torch.device") -> int | None:
    """Peak memory of this process so far: on its GPU if `device` is one, else on the host."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return resident_peak_bytes()


# --- The variables of torchrun and SLURM: rank and world size of a process, and their consistency. Free of torch ---

TORCHRUN, SLURM = "torchrun", "slurm"
# Variables that each launcher sets together. The first one shows that the launcher started this process.
LAUNCHERS = {
    TORCHRUN: ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    SLURM: ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_JOB_ID"),
}  # fmt: skip
# The rank, the world size, and a number that must divide it: each node has the same number of processes.
PARTS = {TORCHRUN: ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), SLURM: ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NNODES")}
NUMBERS = [name for names in LAUNCHERS.values() for name in names[1:] if name != "MASTER_ADDR"]
# Values that are valid without a launcher: one process with rank 0. SLURM's counts are those of the whole job.
ALONE = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1,
         "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0}  # fmt: skip


def number_from_env(env: Mapping[str, str], *names: str, default: int = 1) -> int:
    """The first of the variables `names` that is set; `default` if none is, or if invalid (see `launcher_problems`)."""
    value = next((env[name] for name in names if name in env), "")
    return int(value) if value.isdecimal() else default


def external_launcher(env: Mapping[str, str]) -> str | None:
    """The launcher, other than Lockstep, that started this process as one of several; None if there is none."""
    if LAUNCHERS[TORCHRUN][0] in env:
        return TORCHRUN
    # The number of tasks of the step: 1 for an interactive step. The batch script itself has no step id.
    tasks = number_from_env(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    return SLURM if tasks > 1 and LAUNCHERS[SLURM][0] in env else None


def launcher_problems(env: Mapping[str, str]) -> list[str]:
    """Why the rank of this process is unknown: variables that are invalid, incomplete or contradictory."""
    launcher = external_launcher(env)
    invalid = [name for name in NUMBERS if name in env and not env[name].isdecimal()]
    if invalid:
        reason = "not a whole number"
    elif launcher is None:
        invalid = [name for name, value in ALONE.items() if int(env.get(name, value)) != value]
        reason = "neither torchrun (TORCHELASTIC_RUN_ID) nor a SLURM step (SLURM_STEP_ID and SLURM_NTASKS) started this process"
    elif missing := [name for name in LAUNCHERS[launcher] if not env.get(name)]:
        invalid, reason = [LAUNCHERS[launcher][0]], f"{launcher} also sets {', '.join(missing)}, which is missing"
    else:
        rank, size, parts = (int(env.get(name, "1")) for name in PARTS[launcher])
        is_uneven = launcher == SLURM and "," in env.get("SLURM_STEP_TASKS_PER_NODE", "")  # such as 3,1; else 2(x2)
        contradict = rank >= size or not parts or size % parts or is_uneven
        invalid = [name for name in (*PARTS[launcher], "SLURM_STEP_TASKS_PER_NODE") if name in env and contradict]
        reason = "they contradict each other; each node needs the same number of processes"
    if not invalid:
        return []
    # The variables of a launcher belong together: if one is unset, the remaining ones are an error.
    unset = {*invalid}.union(*(names for names in LAUNCHERS.values() if {*names} & {*invalid})) & env.keys()
    assignments = ", ".join(f"{name}={env[name]}" for name in invalid)
    advice = f"If they are left over from a different job, run unset {' '.join(sorted(unset))}, then rerun the command."
    return [f"{assignments} in the environment: {reason}. {advice}"]


# --- The processes and devices of a run. Free of torch ---


@dataclass(frozen=True)
class StrategySpec:
    """Properties of a strategy that are needed before torch is imported. The defaults are those of DDP."""

    one_process: bool = False  # for all devices; otherwise one process per device
    splits_batches: bool = False  # among the GPUs of the process
    is_sharded: bool = False  # the parameters, gradients and optimizer state
    precisions: tuple[str, ...] | None = None  # None: all
    adds_in_fixed_order: bool = True  # tree reduction: a step is bit-identical on any number of processes


SPECS = {  # by the `_target_` of the strategy; a custom strategy is treated like DDP
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
    external: str | None = None  # the launcher that started the processes: torchrun, slurm, or None for Lockstep
    one_process: bool = False  # copied from the StrategySpec

    @property
    def size(self) -> int:
        """Number of processes."""
        return 1 if self.one_process else self.devices * self.nodes


def gpu_count() -> int:
    """The number of GPUs that this process may use and the installed torch supports."""
    return 0 if why_no_gpu() else len(capabilities())


def threads(world: "World", env: Mapping[str, str] = os.environ) -> int | None:
    """Threads of each CPU process that an external launcher started, to share the cores; None keeps the default.

    By default torchrun gives each process one thread, however many cores there are.
    """
    if world.external == "torchrun" and world.devices > 1 and env.get("OMP_NUM_THREADS") == "1":
        return max(1, cores() // world.devices)
    if world.external == "slurm" and "OMP_NUM_THREADS" not in env:
        per_task = env.get("SLURM_CPUS_PER_TASK")
        on_node = int(env.get("SLURM_CPUS_ON_NODE", os.cpu_count() or 1))
        is_bound = cores() < on_node  # pinned to its own cores; otherwise each task sees all
        return int(per_task) if per_task else cores() if is_bound else max(1, min(cores(), on_node) // world.devices)
    return None


def visible_gpus() -> list[str]:
    """The GPUs of this process, named as in CUDA_VISIBLE_DEVICES."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",")[: gpu_count()] if names else [str(i) for i in range(gpu_count())]


def accelerator_of(accelerator: str) -> str:
    """`trainer.accelerator` with `auto` and `gpu` resolved: cuda, mps or cpu."""
    if accelerator in ("auto", "gpu"):
        return "cuda" if gpu_count() else "mps" if HAS_MPS else "cuda" if accelerator == "gpu" else "cpu"
    return accelerator


def available(accelerator: str) -> int | None:
    """The number of devices of this machine; None without a limit, as for CPU processes."""
    return {"cuda": gpu_count(), "mps": 1}.get(accelerator)


def rank_of(env: Mapping[str, str] = os.environ) -> int:
    """The rank of this process, available before the config; 0 if it is the only process."""
    return number_from_env(env, "SLURM_PROCID" if external_launcher(env) == "slurm" else "RANK", default=0)


def all_gather_objects(value: Any) -> list[Any]:
    """Gathers `value` from all processes of a run, ordered by rank. Call it on every rank. Imports torch."""
    import torch

    dist: Any = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def device_count(devices: int | str | list[int], accelerator: str, *, one_device: bool) -> int:
    """The number of devices for `trainer.devices`: auto, -1, a number, or a list of device ids."""
    if devices in ("auto", -1):
        return 1 if devices == "auto" and one_device else available(accelerator) or 1
    return devices if isinstance(devices, int) else len(devices)


def world_of(
    strategy: str,
    name: Any,
    accelerator: Any,
    devices: int | str | list[int],
    nodes: int,
    env: Mapping[str, str] = os.environ,
) -> World:
    """The processes that a config requests; under torchrun and SLURM, the ones they started. `strategy`: its target."""
    spec, accelerator = spec_of(strategy), accelerator_of(str(accelerator))
    count = device_count(devices, accelerator, one_device=spec.one_process and not spec.splits_batches)
    external, rank = external_launcher(env), rank_of(env)
    if external == TORCHRUN:
        count, nodes = int(env["LOCAL_WORLD_SIZE"]), int(env["WORLD_SIZE"]) // int(env["LOCAL_WORLD_SIZE"])
    elif external == SLURM:
        nodes = number_from_env(env, "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
        count = int(env["SLURM_NTASKS"]) // nodes
    else:
        rank = int(env.get("NODE_RANK", "0")) * count
    return World(accelerator, count, nodes, str(name), rank, external, spec.one_process)


# --- The network ---


def unreachable(server: str, timeout_s: float = 5.0) -> str:
    """Why a server cannot be reached; empty if it can be reached, or behind a proxy."""
    url = urlsplit(server)
    if any(name.lower().endswith("proxy") for name in os.environ):
        return ""
    try:
        socket.create_connection((url.hostname or "", url.port or {"http": 80}.get(url.scheme, 443)), timeout_s).close()
    except OSError as e:
        return f"{url.netloc} cannot be reached ({e})"
    return ""
