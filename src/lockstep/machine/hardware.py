"""What this machine has and is good at, found out without importing torch."""

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

from lockstep.machine import process

BF16_CPU_FLAGS = {"avx512_bf16", "amx_bf16"}  # of Intel and AMD; on ARM bf16 was not measured
CPUINFO = Path("/proc/cpuinfo")
CONTAINER_LIMITS = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
CUDA_MAJOR, CUDA_BF16 = 75, 8  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR; Ampere and later multiply in bf16


@cache
def cuda() -> ctypes.CDLL | None:
    """The driver, which knows of CUDA_VISIBLE_DEVICES and MIG; None without one."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def cpu_flags() -> set[str]:
    """What an x86 processor says that it can do; elsewhere nothing."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}


@cache
def multiplies_bf16(accelerator: str) -> bool:
    """Whether devices of this kind have units for it here; elsewhere it is emulated, and slower than float32."""
    if accelerator == "cpu":
        return bool(BF16_CPU_FLAGS & cpu_flags())
    driver, major = cuda(), ctypes.c_int(0)
    if accelerator != "cuda" or driver is None:
        return False
    return driver.cuDeviceGetAttribute(ctypes.byref(major), CUDA_MAJOR, 0) == 0 and major.value >= CUDA_BF16


def memory_bytes() -> int:
    """Of this machine, or what its container may use of it."""
    if not hasattr(os, "sysconf"):  # Windows
        return 8 * 2**30
    limits = [path.read_text().strip() for path in CONTAINER_LIMITS if path.is_file()]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(int(limit) for limit in limits if limit.isdigit())])


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
NEVER, OLD_GLIBCS_MOST = 2**31 - 1, 32 * 2**20


def keep_freed_memory() -> None:
    """Lets glibc keep what tensors leave for the next ones instead of giving it back to the system at each step, which then
    hands it out again page by page, zeroed: a step of BasicNet took 14 to 18 ms with that and 11 without in bf16, 22 to 27 and
    18 to 21 in fp32. Whoever has set malloc's own variables has decided, and a caller's process is left alone.

    Not for fsdp, whose gathered blocks leave the heap in pieces: a process of two with half of 151 million parameters had 3.7 GiB
    after 8 steps, still growing, and 1.7 GiB without, where steps took 10 to 20 % longer.
    """
    if (
        process.owned
        and platform.libc_ver()[0] == "glibc"
        and not any(name.startswith("MALLOC_") for name in os.environ)
    ):
        libc = ctypes.CDLL(None)
        if not libc.mallopt(M_MMAP_THRESHOLD, NEVER):
            libc.mallopt(M_MMAP_THRESHOLD, OLD_GLIBCS_MOST)
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)
