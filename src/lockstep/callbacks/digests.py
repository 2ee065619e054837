"""Writes digests.csv (`exact.digests=true`), which shows where two runs part first (extras/comparison.py)."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

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
        losses = self.of_all_ranks(arithmetic.losses)
        weights = [(name, digest(tensor)) for name, tensor in pl_module.state_dict().items()]
        if trainer.is_global_zero:
            parts = {"loss of logical rank": losses, "gradient": self.gradients, "weight": weights}
            for_all = ((what, *pair) for what, named in parts.items() for pair in named)
            columns = ("step", "what", "name", "digest")
            self.csv.append(*(dict(zip(columns, (steps_done(trainer), *row), strict=True)) for row in for_all))

    @staticmethod
    def of_all_ranks(losses: dict[int, Tensor]) -> list[tuple[str, str]]:
        own = {rank: digest(loss.reshape(1)) for rank, loss in losses.items()}
        gathered: list[Any] = [own]
        if torch.distributed.is_initialized():
            gathered = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(gathered, own)
        return [(str(rank), value) for rank, value in sorted(pair for found in gathered for pair in found.items())]
