"""Derives the random numbers of steps and evaluations from what they are used for: no state to save or restore.

Masks of dropout layers depend on the samples of the global batch (training/dropout.py), and random numbers of logical
ranks on (seed, step, logical rank): neither depends on the number of processes. All others depend on (seed,
micro-batch, rank), and so on the number of processes. In an evaluation the batch index replaces the step, so evaluating
the same weights again gives the same result. Hooks that run before a batch begins, such as `on_after_batch_transfer`,
have random numbers of their own, derived in the same way.
"""

import random
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lockstep.strategies.base import PortableCheckpoint
from lockstep.training import dropout
from lockstep.training.arithmetic import StepArithmetic, steps_done
from lockstep.training.batches import Loaders
from lockstep.training.invariance import same_random_numbers


def step_seed(seed: int, *parts: object) -> int:
    return dropout.key_of(seed, *parts) >> 1  # torch's seeds are signed


def seed_generators(seed: int, device_type: str) -> None:
    """Seeds torch's, Python's and NumPy's generators: 0.04 ms of BasicNet's 15 ms step on a CPU.

    torch.manual_seed also visits unused devices, which took 0.58 ms with a CUDA build on a machine without a GPU.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device_type == "cuda":
        torch.cuda.manual_seed_all(seed)  # all devices, for the replicas of dp
    elif device_type == "mps":
        torch.mps.manual_seed(seed)


class StepSeed(Callback):
    """Seeds the generators before each batch, and passes its samples to the dropout layers.

    Comes before the user's callbacks, which may draw random numbers too.
    """

    def __init__(self, seed: int, loaders: Loaders, arithmetic: StepArithmetic, *, masks_by_row: bool) -> None:
        self.seed, self.loaders, self.arithmetic, self.masks_by_row = seed, loaders, arithmetic, masks_by_row
        self.evaluation = ExitStack()  # restores the generators after an evaluation

    def begin(self, trainer: Trainer, *parts: object) -> None:
        seed_generators(step_seed(self.seed, *parts), trainer.strategy.root_device.type)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Runs after a LightningModule has built its layers, perhaps in `setup` or `configure_model`."""
        if self.masks_by_row:
            dropout.use_row_masks(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.masks_by_row:
            dropout.begin(self.rows(trainer, batch_idx))
        self.begin(trainer, *self.arithmetic.seed_parts(trainer, batch_idx))
        self.arithmetic.before_forward(pl_module, batch_idx)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.arithmetic.after_backward(pl_module)

    def rows(self, trainer: Trainer, batch_idx: int) -> dropout.MicroBatch | None:
        """The rows of a micro-batch; None if they are unknown: then each process draws its own masks."""
        rows, strategy = self.loaders.rows(trainer, batch_idx), cast(PortableCheckpoint, trainer.strategy)
        return dropout.MicroBatch(self.seed, steps_done(trainer), strategy.device_rows(rows)) if rows else None

    def before_batch(self, trainer: Trainer, *_: Any) -> None:
        """Between two batches, hooks of an epoch's start and those that move the next batch to the device may draw."""
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self.begin(trainer, "between", *self.arithmetic.seed_parts(trainer, done))

    on_train_start = cast(Any, before_batch)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning still counts the batches of the last epoch."""
        self.begin(trainer, "between", *self.arithmetic.seed_parts(trainer, 0))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        dropout.begin(None)
        self.before_batch(trainer)

    def begin_evaluation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.evaluation.enter_context(same_random_numbers(torch.device("cpu")))  # GPUs are seeded for each batch
        self.on_fit_start(trainer, pl_module)
        self.begin(trainer, "before evaluation", 0, *self.arithmetic.evaluation_parts(trainer, 0))

    def begin_batch(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, loader: int = 0
    ) -> None:
        self.begin(trainer, "evaluation", loader, *self.arithmetic.evaluation_parts(trainer, batch_idx))
        if self.masks_by_row and isinstance(batch, dict) and "index" in batch:  # layers that stay in training mode
            count = len(batch["index"])
            first = trainer.global_rank * count
            rows = trainer.strategy.device_rows(range(first, first + count))  # type: ignore[attr-defined]
            dropout.begin(dropout.MicroBatch(self.seed, f"evaluation {loader} {batch_idx}", rows))

    def end_batch(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, loader: int = 0
    ) -> None:
        dropout.begin(None)
        parts = self.arithmetic.evaluation_parts(trainer, batch_idx + 1)
        self.begin(trainer, "before evaluation", loader, *parts)

    def end_evaluation(self, *_: Any) -> None:
        dropout.begin(None)
        self.evaluation.close()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end_evaluation()
        if trainer.state.fn == "fit":
            self.before_batch(trainer)

    on_validation_start = on_test_start = on_predict_start = begin_evaluation
    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = cast(Any, begin_batch)
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = cast(Any, end_batch)
    on_test_end = on_predict_end = on_exception = cast(Any, end_evaluation)
