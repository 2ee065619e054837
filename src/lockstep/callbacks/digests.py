"""Writes digests.csv (`exact.digests=true`), which shows where two runs part first (extras/comparison.py)."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lockstep.machine.world import objects_of_all
from lockstep.run.folder import RunFolder
from lockstep.training.steps import completes_step, steps_done


def digest(tensor: Tensor) -> str:
    """Of the bits. Every process must call it for a shard."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    bits = whole.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(bits.numpy().tobytes(), digest_size=8).hexdigest()


class Digests(Callback):
    """Digests of each step: losses of the logical ranks, summed gradients before clipping, weights and statistics after the step."""

    def __init__(self, folder: Path) -> None:
        self.csv = RunFolder(folder).digests_log  # not `log`, which Lightning sets
        self.gradients: list[tuple[str, str]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.gradients = [(n, digest(p.grad)) for n, p in pl_module.named_parameters() if p.grad is not None]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not completes_step(trainer, batch_idx):
            return
        arithmetic: Any = pl_module.arithmetic  # of logical ranks: the option needs them
        own = {rank: digest(loss.reshape(1)) for rank, loss in arithmetic.losses.items()}
        losses = sorted(pair for found in objects_of_all(own) for pair in found.items())
        weights = [(name, digest(tensor)) for name, tensor in pl_module.state_dict().items()]
        if trainer.is_global_zero:
            parts = {"loss of logical rank": losses, "gradient": self.gradients, "weight": weights}
            found = [
                {"what": what, "name": name, "digest": bits} for what, named in parts.items() for name, bits in named
            ]
            self.csv.append(*({"step": steps_done(trainer), **row} for row in found))
