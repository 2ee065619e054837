"""A Lightning plugin, for tests: gives the processes of a run little more memory than they have when training begins.

Installed by `install` in a folder for PYTHONPATH, as a package would install it, so that train.py itself is what users have.
"""

import os
import resource
from pathlib import Path

import lightning.pytorch as pl
import torch

MARGIN_MIB = "TEST_MARGIN_MIB"


def install(folder: Path) -> dict[str, str]:
    """Returns the environment in which every Trainer has the callbacks of this file."""
    package = folder / "limited-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: limited\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[lightning.pytorch.callbacks_factory]\nlimited = limited:callbacks\n")
    path = os.pathsep.join([str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    # glibc would keep what was freed in pieces, a different amount in each run.
    return {"PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "65536"}


def used_bytes() -> int:
    """What RLIMIT_DATA counts: memory of this process alone that can be written, without the libraries' gigabytes of code."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData")]
    return int(line.split()[1]) * 1024


class Limit(pl.Callback):
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step or batch_idx:
            return
        torch.ones(1, requires_grad=True).sum().backward()  # starts autograd's threads, whose stacks would count
        margin = int(os.environ[MARGIN_MIB]) * 2**20
        device = trainer.strategy.root_device
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + margin) / total)
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (used_bytes() + margin, resource.RLIM_INFINITY))


def callbacks() -> list[pl.Callback]:
    return [Limit()]
