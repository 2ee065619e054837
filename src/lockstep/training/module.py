"""A LightningModule whose means are over the global batch and whose curves are over all samples."""

# B batch

import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.compat.metric_states import exact_on
from lockstep.errors import UserError
from lockstep.machine.world import all_gather_objects
from lockstep.run import OF_RANK_0
from lockstep.training.arithmetic import StepArithmetic
from lockstep.training.losses import gather_rows


class WholeBatchNeeded(UserError):
    """A module gathers the samples of a global batch, but computes a part of it."""


TINY = torch.finfo(torch.float32).tiny
Sums = dict[str, tuple[Any, Any]]  # by name of a mean: the sum of weighted values, and the sum of weights


class Means:
    """The means that a run logs, as sums of this process.

    Training sums cover the steps since the last logged row; evaluation sums cover the current evaluation. They are in
    the strategies, so all modules can use them.
    """

    def __init__(self) -> None:
        self.train: Sums = {}
        self.evaluation: Sums = {}
        self.of_rank_0 = set[str]()  # logged names whose values are from rank 0 only
        self.step_weight: Tensor | None = None  # of the micro-batches so far of a step with several
        # the means of this micro-batch, as nodes of the graph: their weights, and the mean of these
        self.nodes: dict[Any, tuple[Tensor | None, Tensor | None]] = {}

    def add(self, module: pl.LightningModule, name: str, total: Tensor, weight: Any) -> None:
        """Adds to a mean in float64: sums of float32 are then exact unless numbers differ by a factor of 10^6.

        A row therefore does not depend on the number of processes, nor on checkpoints, which sum over the processes.
        """
        sums, dtype = self.train if module.trainer.training else self.evaluation, exact_on(module.device)
        weight = weight.to(dtype) if isinstance(weight, Tensor) else weight
        add_to_sums(sums, name, total.detach().float().to(dtype), weight)

    def weigh(self, loss: Tensor) -> None:
        """Adds the weight of a micro-batch to that of its step, whose gradients are divided by it after the last one.

        Raises UserError: the loss has a term with other weights, or without.
        """
        nodes, seen = [loss.grad_fn], set[Any]()
        reached: list[tuple[Tensor | None, Tensor | None]] = []  # different weights, and their means
        while nodes:
            if (node := nodes.pop()) is None or node in seen:
                continue
            seen.add(node)
            found = self.nodes.get(node, () if node.next_functions else (None, None))  # of a parameter
            if not found:
                nodes += [following for following, _ in node.next_functions]
            elif not any(same_weights(found[0], weight_B) for weight_B, _ in reached):
                reached.append(found)
        if len(reached) > 1:
            raise UserError(
                "a loss of several micro-batches has a weighted mean (self.mean) and a term with other weights, such as a penalty. Gradients are divided "
                "by the weights of the whole step after the last micro-batch. Give all terms the same weights, or set "
                "trainer.accumulate_grad_batches=1 and remove exact.logical_ranks."
            )
        if reached and (weight := reached[0][1]) is not None:
            self.step_weight = weight if self.step_weight is None else self.step_weight + weight

    def log(self, module: pl.LightningModule) -> None:
        """Logs the means. All processes call it when a row is due, and at the end of an evaluation.

        This is the only communication of losses.
        """
        sums = self.train if module.trainer.training else self.evaluation
        # On the host: Lightning rereads the progress bar's values in each step, which would wait for a GPU.
        totals = sum_over_processes(sums).items()
        means = {name: torch.tensor(total / weight if weight else torch.nan) for name, (total, weight) in totals}
        log_reduced(module, means)
        sums.clear()

    def marked(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """`metrics` with names that are marked if their values are from rank 0 only."""
        return {f"{name}{OF_RANK_0}" if name in self.of_rank_0 else name: value for name, value in metrics.items()}

    def collect(self, *, keeps: bool) -> Sums:
        """The sums of all processes, for a checkpoint. All processes call it.

        The process that `keeps` the sums continues with them; the other processes start at zero.
        """
        sums = sum_over_processes(self.train)
        self.train = dict(sums) if keeps else {}
        return sums

    def load(self, checkpoint: Mapping[str, Any], *, keeps: bool) -> None:
        self.train = dict(checkpoint["window"]) if keeps else {}


def same_weights(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def log_reduced(module: pl.LightningModule, values: Mapping[str, Tensor]) -> None:
    """Logs values that are already combined over all processes, without Lightning's warning."""
    for name, value in values.items():
        module.log(name, value, prog_bar=name == "train/loss")
        warnings.filterwarnings("ignore", message=rf".*`self\.log\('{re.escape(name)}', \.\.\., sync_dist=True\)`")


def strategy_of(module: pl.LightningModule) -> Any:
    """The strategy; None without a Trainer."""
    with suppress(RuntimeError, AttributeError):
        return module.trainer.strategy
    return None


def arithmetic_of(module: pl.LightningModule) -> StepArithmetic:
    """That of the strategy; without one of Lockstep's, that of one process."""
    return getattr(strategy_of(module), "arithmetic", StepArithmetic())


class Module(pl.LightningModule):
    """A LightningModule with `mean`. Under a plain `pl.Trainer`, its means are those of one process and one batch."""

    @property
    def stage(self) -> str:
        """train, val, test or predict: the prefix of logged names."""
        with suppress(RuntimeError, AttributeError):  # no Trainer, or between two stages
            return self.trainer.state.stage.dataloader_prefix or "train"  # type: ignore[union-attr]
        return "train"

    @property
    def batch_weight(self) -> float | None:
        """The weight of this process's micro-batch in the mean of a step: 1 on average.

        0 if the process has no samples and runs on substitutes. None under a plain `pl.Trainer`, which does not divide
        batches.
        """
        weight = getattr(strategy_of(self), "share", None)
        return None if weight is None else float(weight()) if self.trainer.training else 1.0

    def mean(self, values_B: Tensor, weight_B: Tensor | None = None, *, log: str | None = None) -> Tensor:
        """The mean of `values_B` over the global batch, weighted by `weight_B`.

        Use it for the loss of a step or a part of it: the gradient is that of the global mean, regardless of how
        samples are divided among processes. The returned number is this process's contribution.

        `values_B`: one number per sample of the batch. To exclude samples, give them a weight of 0 instead of selecting
        the rest: processes may select different numbers of samples. With weights, all processes must call this method
        in the same steps, because they communicate. If a step has several micro-batches, its gradients are divided once
        it is complete, so all its means have the same weights.
        `log`: also logs the mean under this name, over all samples since the last logged row, or of the evaluation.

        Raises:
            UserError: the shapes are wrong, or a step with several micro-batches has means with different weights.
        """
        if values_B.dim() != 1 or (weight_B is not None and weight_B.shape != values_B.shape):
            shapes = " and ".join(str(tuple(x.shape)) for x in (values_B, weight_B) if x is not None)
            raise UserError(
                f"self.mean got the shape {shapes}; expected one number per sample, and optionally a weight for each."
            )
        values_B = self.own_rows(values_B)
        values_B = values_B.to(torch.promote_types(values_B.dtype, torch.float32))
        if weight_B is None:
            return self.mean_of(values_B, None, log)
        weight_B = self.own_rows(weight_B)
        return self.mean_of(values_B * weight_B.detach(), weight_B, log)

    def mean_of(self, weighted_B: Tensor, weight_B: Tensor | None, log: str | None) -> Tensor:
        """`mean` of values that are already multiplied by their weights."""
        share, mean, count = self.batch_weight, weighted_B.mean(), len(weighted_B)
        if share == 0:  # without samples, a process computes other ones
            mean = mean * 0.0
        weight = None if weight_B is None else weight_B.detach().float().mean().to(exact_on(mean.device))
        average = mean if weight is None else mean / weight.clamp(min=TINY).to(mean.dtype)
        if share is None:  # under a plain Trainer
            if log:
                self.log(log, average, batch_size=count)
            return average
        strategy: Any = self.trainer.strategy
        counted = count if share else 0
        if log:
            strategy.means.add(self, log, mean * counted, counted if weight is None else weight * counted)
        if not self.trainer.training:
            return average
        if self.trainer.accumulate_grad_batches > 1 or strategy.arithmetic.same_bits:
            if mean.grad_fn is not None:
                strategy.means.nodes[mean.grad_fn] = weight_B, None if weight is None else weight * share
            return mean
        if weight is None:
            return mean
        weight_of_step = strategy.reduce(weight * share, reduce_op="mean")
        return mean / weight_of_step.clamp(min=TINY).to(mean.dtype)

    def gather(self, x_B: Tensor) -> Tensor:
        """x_N: the rows of all processes in the order of the global batch, for a loss between samples.

        Differentiable. The loss may be that of all N samples, the same in every process, or of this process's. All
        processes must call it in the same steps, and none in a prediction.

        Raises:
            WholeBatchNeeded: a step has several micro-batches, or this is a prediction.
        """
        if (strategy := strategy_of(self)) is None:
            return x_B
        trainer = self.trainer
        parts = trainer.accumulate_grad_batches if trainer.training else 1
        if trainer.predicting or parts > 1 or arithmetic_of(self).same_bits:
            raise WholeBatchNeeded(
                f"{type(self).__name__} compares the samples of a global batch (self.gather), but this computes a part of it. Remove "
                "exact.logical_ranks, and set trainer.accumulate_grad_batches=1; if memory runs out, use more processes or a smaller batch."
            )
        strategy.gathers = True
        if trainer.world_size == 1:
            return x_B
        has_samples = self.batch_weight != 0
        rows_N, own = gather_rows(x_B if has_samples else x_B[:0], trainer.global_rank, trainer.world_size)
        strategy.gathered = (len(rows_N), own) if has_samples else None
        return rows_N

    def own_rows(self, values_B: Tensor) -> Tensor:
        """The values of this process's samples, if there is one for each gathered sample."""
        count, own = getattr(strategy_of(self), "gathered", None) or (None, slice(None))
        return values_B[own] if len(values_B) == count else values_B


def hook(module: Any, name: str, default: Any = None) -> Any:
    """An optional attribute of a `lockstep.Module`. Those of other modules may have any meaning."""
    return getattr(module, name, default) if isinstance(module, Module) else default


def changed_frozen(module: nn.Module, saved: Mapping[str, str]) -> list[str]:
    """A message for each frozen network or weight that differs from the checkpoint with these digests."""
    digests = {name: m.frozen_digest for name, m in module.named_modules() if hasattr(m, "frozen_digest")}
    tensors = module.state_dict() | dict(module.named_parameters(remove_duplicate=False))
    digests |= {name: digest(tensor) for name, tensor in tensors.items() if name in saved}
    message = "the weights of the frozen network {} differ from those of the checkpoint's run, and checkpoints omit them. Load the same weights, or start a new run."
    return [message.format(name) for name, current in digests.items() if saved.get(name, current) != current]


def digest(tensor: Tensor) -> str:
    """Tells weights apart, but not the same ones on different devices or in different precisions."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return str(int(whole.detach().to(torch.bfloat16).view(torch.int16).sum(dtype=torch.int64)))


def sum_over_processes(sums: Sums) -> Sums:
    """The sums of all processes, by name. Some processes may lack a name."""
    per_process = all_gather_objects({name: (float(total), float(weight)) for name, (total, weight) in sums.items()})
    result: Sums = {}
    for name, (total, weight) in (item for process_sums in per_process for item in process_sums.items()):
        add_to_sums(result, name, total, weight)
    return result


def add_to_sums(sums: Sums, name: str, total: Any, weight: Any) -> None:
    previous = sums.get(name, (0.0, 0.0))
    sums[name] = previous[0] + total, previous[1] + weight


def call_own_train(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Calls the custom `train` of each module that has one: it may keep a part in evaluation mode or do other work."""
    for module, training in modes:
        if type(module).train is not nn.Module.train:
            module.train(training)
