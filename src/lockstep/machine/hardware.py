"""The devices, memory and instructions of this machine. Free of torch."""

import ctypes
import mmap
import os
import platform
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.machine import process

if TYPE_CHECKING:
    import torch

BF16_CPU_FLAGS = {"avx512_bf16", "amx_bf16"}  # Intel and AMD; bf16 on ARM was not measured
CPUINFO = Path("/proc/cpuinfo")
CONTAINER_LIMITS = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
CUDA_MAJOR, CUDA_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
VOLTA, AMPERE = 70, 80  # the first compute capabilities with fp16 and with bf16 units


@cache
def cuda() -> ctypes.CDLL | None:
    """The CUDA driver, which respects CUDA_VISIBLE_DEVICES and MIG; None without one."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def asked(function: str, *arguments: int) -> int:
    """The driver's answer; 0 without one."""
    driver, answer = cuda(), ctypes.c_int(0)
    return answer.value if driver and getattr(driver, function)(ctypes.byref(answer), *arguments) == 0 else 0


@cache
def capabilities() -> list[int]:
    """The compute capability of each GPU that the driver shows to this process: 90 for an H100."""
    of, gpus = "cuDeviceGetAttribute", range(asked("cuDeviceGetCount"))
    return [10 * asked(of, CUDA_MAJOR, gpu) + asked(of, CUDA_MINOR, gpu) for gpu in gpus]


def has_kernels(capability: int, architectures: list[str]) -> bool:
    """Kernels of `sm_80` run on 8.0 to 8.9; those of `compute_80` are compiled for any newer GPU."""
    built = [(name.partition("_")[0], int("".join(filter(str.isdigit, name)))) for name in architectures]
    return any(n <= capability and (kind == "compute" or n // 10 == capability // 10) for kind, n in built)


# --- The CUDA version and the GPU architectures of the installed torch, without importing it, which takes seconds ---
#
# torch 2.13 states both only after its import (`torch.version.cuda`, `torch.cuda.get_arch_list()`). They are read from its files, in
# 0.02 s. None if they are not found: the driver is believed then.

CUDA_LINE = re.compile(r"^cuda\b.*= *(?:None|['\"]([\d.]+)['\"])", re.MULTILINE)
ARCHITECTURES = re.compile(rb"\0(sm_\d+[a-z]?(?: (?:sm|compute)_\d+[a-z]?)*)\0")


def torch_folder() -> Path | None:
    found = find_spec("torch")
    return Path(found.origin).parent if found and found.origin else None


@cache
def cuda_of_torch() -> str | None:
    """`13.0`; empty for a build without CUDA."""
    file = (torch_folder() or Path()) / "version.py"
    found = CUDA_LINE.search(file.read_text()) if file.is_file() else None
    return found and (found[1] or "")


@cache
def architectures_of_torch() -> list[str] | None:
    """`[sm_75, sm_80, ...]`."""
    library = next((torch_folder() or Path()).glob("lib/*torch_python.*"), None)
    if library is None:
        return None
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = ARCHITECTURES.search(content, max(0, content.find(b"\0sm_")))  # a fast look first: it has 30 MB
        return found[1].decode().split() if found else None


@cache
def why_no_gpu() -> str | None:
    """Why torch cannot use the GPUs that the driver shows; None if it can, or if there are none."""
    if not capabilities():
        return None
    built, architectures, driver = cuda_of_torch(), architectures_of_torch(), asked("cuDriverGetVersion")
    old = {f"{c // 10}.{c % 10}" for c in capabilities() if architectures and not has_kernels(c, architectures)}
    if built == "":
        return "the installed torch is a build without CUDA; https://pytorch.org/get-started has one with it"
    if built and driver // 1000 < int(built.partition(".")[0]):
        return (
            f"the installed torch needs a driver for CUDA {built}, and this one is for {driver // 1000}.{driver % 1000 // 10}; "
            "update the driver, or install a torch for an older CUDA"
        )
    if old:
        return (
            f"the installed torch has no kernels for a GPU of compute capability {', '.join(sorted(old))}, only {' '.join(architectures or ())}; "
            "install a torch for an older CUDA, or hide that GPU with CUDA_VISIBLE_DEVICES"
        )
    return None


def cpu_flags() -> set[str]:
    """The feature flags of an x86 processor on Linux; elsewhere none."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}


def multiplies_bf16(accelerator: str) -> bool:
    """Whether this machine's devices of that kind have bf16 units. Emulated bf16 is slower than float32."""
    if accelerator == "cpu":
        return bool(BF16_CPU_FLAGS & cpu_flags())
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

    By default glibc returns it to the system at each step, which hands it out again page by page, zeroed. A step of BasicNet took
    11 ms with kept memory and 14 to 18 without in bf16; 18 to 21 and 22 to 27 in fp32.

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
