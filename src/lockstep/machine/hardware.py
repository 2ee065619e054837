"""The devices, memory and instructions of this machine. Free of torch."""

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

from lockstep.machine import process

BF16_CPU_FLAGS = {"avx512_bf16", "amx_bf16"}  # Intel and AMD; bf16 on ARM was not measured
CPUINFO = Path("/proc/cpuinfo")
CONTAINER_LIMITS = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
CUDA_MAJOR, CUDA_BF16 = 75, 8  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR; Ampere and later have bf16 units


@cache
def cuda() -> ctypes.CDLL | None:
    """The CUDA driver, which respects CUDA_VISIBLE_DEVICES and MIG; None without one."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def cpu_flags() -> set[str]:
    """The feature flags of an x86 processor on Linux; elsewhere none."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}


@cache
def multiplies_bf16(accelerator: str) -> bool:
    """Whether this machine's devices of that kind have bf16 units. Emulated bf16 is slower than float32."""
    if accelerator == "cpu":
        return bool(BF16_CPU_FLAGS & cpu_flags())
    driver, major = cuda(), ctypes.c_int(0)
    if accelerator != "cuda" or driver is None:
        return False
    return driver.cuDeviceGetAttribute(ctypes.byref(major), CUDA_MAJOR, 0) == 0 and major.value >= CUDA_BF16


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
    if (
        process.owned
        and platform.libc_ver()[0] == "glibc"
        and not any(name.startswith("MALLOC_") for name in os.environ)
    ):
        libc = ctypes.CDLL(None)
        if not libc.mallopt(M_MMAP_THRESHOLD, NEVER):
            libc.mallopt(M_MMAP_THRESHOLD, OLD_GLIBCS_MOST)
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)
