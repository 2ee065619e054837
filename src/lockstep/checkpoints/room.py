"""Whether a disk has room for a run's checkpoints, before the first step."""

import copy
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoints.trees import leaves
from lockstep.config.words import size
from lockstep.machine.files import nearest

STATES = 8  # no optimizer keeps so many values per parameter


def tensor_bytes(tree: Any) -> int:
    """Of all tensors in `tree`, each counted once; the whole of a sharded tensor."""
    tensors = {id(leaf): leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def on_meta(parameter: Tensor) -> nn.Parameter:
    made = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    made.grad = torch.empty_like(made)
    return made


def state_bytes(optimizer: Optimizer) -> int:
    """The size of an optimizer's state after a step, tried on tensors without memory; 0 if it cannot step on them."""
    trial = copy.copy(optimizer)
    kernels = dict.fromkeys(("fused", "foreach", "capturable"), False)
    trial.state = defaultdict(dict)
    trial.param_groups = [
        {
            **group,
            **{key: kernels.get(key, group[key]) for key in group},
            "params": [on_meta(p) for p in group["params"] if p.requires_grad],
        }
        for group in optimizer.param_groups
    ]
    try:
        type(optimizer).step(trial)  # not the instance's own, which a scheduler binds to the real one
    except Exception:
        return 0
    return tensor_bytes(list(trial.state.values()))


def problem(trainer: pl.Trainer, module: pl.LightningModule, folder: Path) -> str | None:
    """Why the checkpoints of a run do not fit into `folder`. Those of an earlier part of the run are replaced."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    weights = tensor_bytes(module.state_dict(keep_vars=True))  # tied weights are one tensor
    copies = 1 + sum(getattr(callback, "saved_weights", 0) for callback in callbacks)
    # the most at a time: the best, the last, and the one that is being written
    files = 2 + sum(max(0, callback.save_top_k) for callback in callbacks if isinstance(callback, ModelCheckpoint))
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    room = there + shutil.disk_usage(nearest(folder)).free
    if room >= files * (copies + STATES) * weights:  # the trial takes 0.3 s for AdamW and resnet50d
        return None
    each = copies * weights + sum(map(state_bytes, trainer.optimizers))
    if room >= files * each:
        return None
    return (
        f"{folder} has {size(room)} for checkpoints, and {files} of {size(each)} need {size(files * each)}: the best, the last and the one "
        f"that is being written. {size(files * each - room)} are missing. Free some space, or type runs_dir=<a folder with more room>, checkpoint.save_top_k=1 for fewer files, or "
        "trainer.enable_checkpointing=false."
    )


def missing(content: Any, folder: Path) -> str:
    """How much room a checkpoint that could not be written lacks."""
    needed, free = tensor_bytes(content), shutil.disk_usage(nearest(folder)).free
    lacking = f": {size(needed - free)} are missing." if needed > free else "."
    return f" It needs {size(needed)}, and {size(free)} are free{lacking}"
