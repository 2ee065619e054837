"""Counts steps: how many are done, when one is complete, and when it has a log row."""

import math
from typing import Any

import lightning.pytorch as pl

from lockstep.data.sampler import place_in_step


def steps_done(trainer: pl.Trainer) -> int:
    """Optimizer steps done; batches under manual optimization, where `trainer.global_step` counts every optimizer's steps."""
    if trainer.lightning_module.automatic_optimization:
        return int(trainer.global_step)
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(total.processed)


def completes_step(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether the micro-batch `batch_idx` of an epoch is the last of its optimizer step."""
    last = batch_idx + 1 == trainer.num_training_batches or trainer.is_last_batch
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or last


def micro_batch_index(trainer: pl.Trainer, batch_idx: int) -> int:
    """Which micro-batch of its global batch the micro-batch `batch_idx` of an epoch is, in this process."""
    parts = trainer.accumulate_grad_batches
    contiguous: bool = trainer.strategy.contiguous_micro_batches  # type: ignore[attr-defined]
    return place_in_step(trainer.global_rank, trainer.world_size, batch_idx % parts, parts, contiguous)


def total_steps(trainer: pl.Trainer) -> float:
    """Optimizer steps of the whole run; infinite where it has no end, or its dataloader no length."""
    steps = trainer.estimated_stepping_batches
    return math.inf if steps < 0 else steps


def has_row(trainer: pl.Trainer, step: int) -> bool:
    """Whether the log has a row after `step` optimizer steps."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # the Trainer gets it from its connector
    return step % every == 0
