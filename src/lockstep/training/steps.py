"""When an optimizer step is complete, and when it has a row in the log."""

import lightning.pytorch as pl


def completes_step(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether the micro-batch `batch_idx` of an epoch is the last of its optimizer step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def has_row(trainer: pl.Trainer, step: int) -> bool:
    """Whether the log has a row after `step` optimizer steps."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # the Trainer gets it from its connector
    return step % every == 0
