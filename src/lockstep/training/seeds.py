"""Whose random numbers come next: those of the samples of a micro-batch, or those of the step, equal on all ranks.

They are derived from what they are used for, so there is no state to save or restore.

- The samples': hooks that move a micro-batch to the device, its forward and its backward. They depend on (seed, micro-batch, rank),
  and so on the number of processes; with logical ranks on (seed, step, logical rank). Masks of dropout layers depend on the samples
  of the global batch alone (training/dropout.py).
- The step's: everything else, such as other hooks, callbacks, the optimizer, metrics at the end of an epoch. They depend on
  (seed, step). Ranks that drew different numbers here would drift apart.

In an evaluation the batch index replaces the step, so evaluating the same weights again gives the same result.
"""

import random
from collections import Counter

import lightning.pytorch as pl
import numpy as np
import torch

from lockstep.training import dropout
from lockstep.training.arithmetic import StepArithmetic, completes_step, steps_done


def derive_seed(seed: int, *parts: object) -> int:
    return dropout.key_of(seed, *parts) >> 1  # torch's seeds are signed


def seed_generators(seed: int, device_type: str) -> None:
    """Seeds torch's, Python's and NumPy's generators: 0.015 ms of BasicNet's 15 ms step on a CPU.

    torch.manual_seed also visits unused devices, which took 0.58 ms with a CUDA build on a machine without a GPU.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device_type == "cuda":
        torch.cuda.manual_seed_all(seed)  # all devices, for the replicas of dp
    elif device_type == "mps":
        torch.mps.manual_seed(seed)


class StepSeeds:
    """Seeds the generators whenever they pass from the samples to the step, or back."""

    def __init__(self, seed: int, arithmetic: StepArithmetic, trainer: pl.Trainer) -> None:
        self.seed, self.arithmetic, self.trainer = seed, arithmetic, trainer
        self.batch = self.loader = 0  # the current batch of an epoch, and its evaluation loader
        self.counts = Counter[str]()  # how often each phase of this batch has begun
        self.of_samples = self.within_samples = False  # whose numbers are drawn now, and were before an update

    def reseed(self, *parts: object, of_samples: bool = False) -> None:
        self.of_samples = of_samples
        seed_generators(derive_seed(self.seed, *parts), self.trainer.strategy.root_device.type)

    def begin_batch(self, batch_idx: int, loader: int = 0, *, draws: bool = True) -> None:
        """`draws`: whether something may draw numbers of the step before `samples`."""
        self.batch, self.loader, self.of_samples = batch_idx, loader, False
        self.counts.clear()
        if draws:
            self.step("batch start")

    def step(self, phase: str) -> None:
        """Next come numbers of the step, which `phase` distinguishes from those of other phases."""
        trainer = self.trainer
        if not trainer.training:
            self.reseed("evaluation", phase, self.loader, self.batch)
            return
        # an update draws the same numbers with accumulation as without, and with several logical ranks as with one
        part = 1 + self.batch % trainer.accumulate_grad_batches
        if self.arithmetic.same_bits or completes_step(trainer):
            part = 0
        self.reseed(phase, steps_done(trainer), part, self.counts[phase])
        self.counts[phase] += 1

    def samples(self) -> None:
        """Next come numbers of the samples of the current batch."""
        again = self.counts["samples"]  # after a closure, an update or a hook
        self.reseed(*self.sample_key(self.batch), *[again] * bool(again), of_samples=True)
        self.counts["samples"] += 1

    def transfer(self, hook: str) -> None:
        """Next comes a hook that moves the next batch to the device."""
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self.reseed(*self.sample_key(done if self.trainer.training else self.batch + 1), hook, of_samples=True)

    def sample_key(self, batch_idx: int) -> tuple[object, ...]:
        if self.trainer.training:
            return self.arithmetic.seed_parts(self.trainer, batch_idx)
        return "evaluation", self.loader, *self.arithmetic.evaluation_parts(self.trainer, batch_idx)

    def begin_update(self) -> None:
        """An update belongs to the step, even within the training step of a module with manual optimization."""
        self.within_samples = self.of_samples
        if self.within_samples:
            self.step("update")

    def end_update(self) -> None:
        if self.within_samples:
            self.samples()
