"""Losses between samples (`Task.between_samples`): every process computes the loss of the whole global batch.

Outputs and batches are gathered in the order of the global batch. Each process then has the whole loss, so its gradient with
respect to its own outputs is complete: backward communicates nothing more.
"""

# B batch of this process · N global batch

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from omegaconf import DictConfig
from torch import Tensor

from lockstep.config.identity import title
from lockstep.config.rules import division_of_whole_batch
from lockstep.data.datamodule import DataModule
from lockstep.data.dataset import Batch
from lockstep.data.sampler import FILLER
from lockstep.errors import UserError
from lockstep.machine.world import World
from lockstep.tasks import Task
from lockstep.training.metrics import one_per_sample
from lockstep.training.trees import float32, samples_at


def problems(cfg: DictConfig, world: World, data: DataModule, task: Task) -> Iterator[str]:
    """What would cut a batch, so that samples of it do not meet."""
    if not task.between_samples:
        return
    yield from division_of_whole_batch(cfg)
    batch, largest = data.eval_batch_size, max(data.val_split.count, data.test_split.count)
    if batch % world.size and batch < largest:
        low = batch // world.size * world.size
        yield (
            f"data.eval_batch_size={batch} cannot be divided among {world.size} processes, and task={title(cfg.task)} compares the samples of a "
            f"batch (between_samples): other batches than those of one process would give other figures. Type data.eval_batch_size={low or world.size}."
        )


def whole_batch(task: Task, output: Any, batch: Batch, trainer: pl.Trainer) -> tuple[Any, Batch]:
    """For a task with `between_samples`, the outputs, with gradients, and the batch of all processes; for others its arguments."""
    if not task.between_samples or trainer.world_size == 1:
        return output, batch
    rank, world, size_B = trainer.global_rank, trainer.world_size, len(batch["index"])

    def gather(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != size_B:
            raise UserError(
                f"{type(task).__name__}.between_samples gathers tensors with a row per sample, but one has the shape {tuple(tensor.shape)} in a batch "
                f"of {size_B}. Return tensors of {size_B} rows from `outputs`; expand what all samples share."
            )
        sent = tensor.detach().contiguous()
        parts_N = [torch.empty_like(sent) for _ in range(world)]
        torch.distributed.all_gather(parts_N, sent)
        if tensor.requires_grad:
            parts_N[rank] = own = tensor.view_as(tensor)
            own.register_hook(lambda gradient: gradient * world)  # the strategy averages gradients over processes
        return torch.cat(parts_N)

    batch = dict(batch)
    if "partner" in batch:  # a place in the micro-batch
        batch["partner"] = batch["partner"] + rank * size_B
    if lists := {name: value for name, value in batch.items() if isinstance(value, list)}:
        every: list[Any] = [None] * world
        # over the CPU: a tensor would arrive on the sender's GPU
        torch.distributed.all_gather_object(every, move_data_to_device(lists, "cpu"))
        joined = {name: [item for part in every for item in part[name]] for name in lists}
        batch |= move_data_to_device(joined, batch["index"].device)
    named = {name: value for name, value in batch.items() if name not in lists}
    gathered: Batch = {**batch, **apply_to_collection(named, Tensor, gather), "count": size_B * world}
    return apply_to_collection(output, Tensor, gather), gathered


def evaluation_loss(task: Task, output: Any, batch: Batch, module: pl.LightningModule) -> Tensor | None:
    """loss_B of this process's real samples, among those of all processes; None if the task compares no samples, or one process has
    them all. Every process must call it, also one without samples."""
    if not task.between_samples or module.trainer.world_size == 1:
        return None
    output, gathered = whole_batch(task, float32(output), batch, module.trainer)
    places = (gathered["index"] != FILLER).nonzero()[:, 0].tolist()
    first = module.trainer.global_rank * len(batch["index"])
    before = sum(place < first for place in places)
    output = apply_to_collection(output, Tensor, lambda tensor: tensor[places])
    named = {**samples_at(gathered, places, gathered["count"]), "count": len(places)}
    return one_per_sample(task.loss(output, named), task, named)[before : before + batch["count"]]
