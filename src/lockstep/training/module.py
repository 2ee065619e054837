"""A LightningModule whose means are those of the global batch, and whose curves are of all samples."""

# B batch

import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lockstep.compat.metric_states import exact_on
from lockstep.errors import UserError
from lockstep.machine.world import objects_of_all

Sums = dict[str, tuple[Any, Any]]  # by the name of a mean: of weighted values, and of weights


class Module(pl.LightningModule):
    """A LightningModule with `mean`. With a plain `pl.Trainer` it works too: its means are those of a process and a batch then."""

    weights_later = False  # whether gradients are divided by the weights of a step once it is complete

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Of this process: since the last row of the log, and in this evaluation.
        self.train_sums: Sums = {}
        self.eval_sums: Sums = {}

    @property
    def stage(self) -> str:
        """train, val, test or predict: for the names of what is logged."""
        with suppress(RuntimeError, AttributeError):  # without a Trainer, or between two stages
            return self.trainer.state.stage.dataloader_prefix or "train"  # type: ignore[union-attr]
        return "train"

    @property
    def share(self) -> float | None:
        """How much the samples of this process count in the mean of a step: 1 on average, 0 if it has none and computes others.
        None if nobody divides batches, as under a plain `pl.Trainer`."""
        strategy: Any = None
        with suppress(RuntimeError):
            strategy = self.trainer.strategy
        divided = getattr(strategy, "share", None)
        return None if divided is None else float(divided()) if self.trainer.training else 1.0

    def mean(self, values_B: Tensor, weight_B: Tensor | None = None, *, log: str | None = None) -> Tensor:
        """The mean of `values_B` over the global batch, weighted by `weight_B`. The loss of a step, or a part of it, has the gradient of
        that mean, however samples are divided among processes. The number itself is what this process contributes.

        `values_B`: a number for each sample of the batch. Leave out samples by a weight of 0, not by selecting others: processes may
        select different numbers of them. With weights, all processes must call it in the same steps, because they communicate.
        `log`: logs the mean under this name, too: over all samples since the last row of the log, or of the evaluation.

        Raises:
            UserError: the shapes are wrong, or a step has several micro-batches, so the weights of the later ones are not known.
        """
        if values_B.dim() != 1 or (weight_B is not None and weight_B.shape != values_B.shape):
            given = " and ".join(str(tuple(x.shape)) for x in (values_B, weight_B) if x is not None)
            raise UserError(f"self.mean gets the shape {given}; it takes one number per sample, and a weight for each.")
        share, values_B = self.share, values_B.to(torch.promote_types(values_B.dtype, torch.float32))
        counts_B = torch.full_like(values_B, 0.0 if share == 0 else 1.0)
        counts_B = counts_B if weight_B is None else counts_B * weight_B.detach()
        total, weight = (values_B * counts_B).sum(), counts_B.sum()
        if weight_B is None:
            found = values_B.mean()
        else:
            later = share is None or not self.trainer.training or self.weights_later
            divisor = weight if later else self.weight_of_step(weight) * (share or 0.0)
            found = total / divisor.clamp(min=torch.finfo(divisor.dtype).tiny)
        if log and share is None:
            self.log(log, found, batch_size=len(values_B))
        elif log:
            self.add(log, total, weight)
        return found

    def weight_of_step(self, weight: Tensor) -> Tensor:
        """Of the global batch, on average over processes, which all call it."""
        strategy: Any = self.trainer.strategy
        if self.trainer.accumulate_grad_batches > 1 or strategy.arithmetic.same_bits:
            raise UserError(
                "self.mean with weights needs those of the whole global batch, but a step of several micro-batches does not know the later ones. "
                "Set trainer.accumulate_grad_batches=1, and no exact.logical_ranks; or write a lockstep.tasks.Task, which divides later."
            )
        return torch.as_tensor(strategy.reduce(weight.clone(), reduce_op="mean"))

    def add(self, name: str, total: Tensor, weight: Any) -> None:
        """Sums of float32 in float64 are exact, unless one is 10^6 times another: so neither a checkpoint, which adds up processes, nor
        their number changes a row."""
        sums, exact = self.train_sums if self.trainer.training else self.eval_sums, exact_on(self.device)
        before = sums.get(name, (0.0, 0.0))
        weight = weight.to(exact) if isinstance(weight, Tensor) else weight
        sums[name] = before[0] + total.detach().float().to(exact), before[1] + weight

    def log_means(self) -> None:
        """All processes call it where a row of the log is due, and at the end of an evaluation."""
        sums = self.train_sums if self.trainer.training else self.eval_sums
        for name, (total, weight) in of_all(sums).items():
            # On the host: Lightning reads what a progress bar shows again in each step, which would wait for a GPU.
            self.log(name, torch.tensor(total / weight if weight else torch.nan), prog_bar=name == "train/loss")
            # It is of all processes already.
            warnings.filterwarnings("ignore", message=rf".*`self\.log\('{re.escape(name)}', \.\.\., sync_dist=True\)`")
        sums.clear()

    def gathered(self) -> Sums:
        """For a checkpoint, for which all processes call it: the first one has the sums of all from now on."""
        found = of_all(self.train_sums)
        self.train_sums = dict(found) if self.trainer.is_global_zero else {}
        return found

    def continue_sums(self, checkpoint: Mapping[str, Any]) -> None:
        window = checkpoint.get("window", {})
        if isinstance(window.get("loss"), float):  # until November 2026: of micro-batches, the mean of all processes
            samples = checkpoint["config"]["data"]["batch_size"] / checkpoint["accumulate_grad_batches"]
            window = {"train/loss": (window["loss"] * samples, window["weight"] * samples)}
        self.train_sums = dict(window) if self.trainer.is_global_zero else {}


def other_frozen(module: nn.Module, saved: Mapping[str, str]) -> list[str]:
    """What is told of frozen networks with other weights than those that a checkpoint has digests of."""
    frozen = {name: each.frozen_digest for name, each in module.named_modules() if hasattr(each, "frozen_digest")}
    words = "the weights of {}, a frozen network, are not in checkpoints, and not those that it had. Load those, or start a new run."
    return [words.format(name) for name, digest in frozen.items() if saved.get(name, digest) != digest]


def of_all(sums: Sums) -> Sums:
    """Of all processes, of which some may lack a name."""
    of_each = objects_of_all({name: (float(total), float(weight)) for name, (total, weight) in sums.items()})
    found: Sums = {}
    for name, (total, weight) in (item for each in of_each for item in each.items()):
        before = found.get(name, (0.0, 0.0))
        found[name] = before[0] + total, before[1] + weight
    return found
