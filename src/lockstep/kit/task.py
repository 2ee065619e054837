"""A LightningModule with a loss per sample: its means, its metrics, and what the report shows of them; and what tasks check."""

# B batch · N sample

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from lockstep import Batch, Measured, Module, UserError, losses, optim

log_once = cache(logging.getLogger("lockstep").warning)


class Task(Module):
    """Subclass it in your own file: override `loss`, and whatever else differs.

    The loss is averaged over the global batch, and every batch has real samples only.

    Args:
        net: the network, from the config's `model`.
        optimizer: creates an optimizer of parameters (`optim`).
        scheduler: creates the schedule of an optimizer (`schedule`), which advances after each optimizer step.
        metadata: that of the data set.
        metrics: further metrics by name, each as a function of `metric_arguments()`.

    Raises:
        UserError: `metadata` lacks a key that the class needs.
    """

    mixes = True  # `mean_loss` weighs the two targets of mixed samples

    needs: ClassVar[tuple[str, ...]] = ()  # keys that `metadata` must have
    names: ClassVar[str] = "classes"  # the key of `metadata` that names the values of outputs and metrics
    titles: ClassVar[Mapping[str, tuple[str, str]]] = {}  # title and unit of curves in the report, by metric or `loss`
    # Turns outputs into predictions in exported networks: softmax, next_token, sigmoid or identity. Set it in a class
    # with different `predictions`. None: an exported network returns its outputs unchanged.
    activation: str | None = None
    # Under mixed precision, the network's last layer computes in float32, for outputs with more than 3 digits.
    float32_head: bool = False
    target_spec: Any = None  # checked before training, or when targets are read; None: any `target`

    def __init__(
        self,
        *,
        net: nn.Module,
        optimizer: Callable[[Iterable[Tensor]], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler],
        metadata: Mapping[str, Any],
        metrics: Mapping[str, Callable[..., Metric]] | None = None,
    ) -> None:
        super().__init__()
        self.check_metadata(metadata)
        self.net, self.optimizer, self.scheduler, self.metadata = net, optimizer, scheduler, metadata
        self.further_metrics = metrics or {}
        # The mean loss and the metrics of each evaluation set. They are no children of this module: checkpoints would hold a
        # metric's own network, and DDP would wait for its gradients.
        self.evaluated: dict[str, Measured] = {}
        if self.float32_head:
            optim.compute_in_float32(optim.head_of(net))

    def __init_subclass__(cls, **arguments: Any) -> None:
        """A class that overrides `loss` accepts any `target`, unless it also sets `target_spec`."""
        super().__init_subclass__(**arguments)
        if old := {"attach", "between_samples", "bind", "model_kwargs", "new_optimizer"} & vars(cls).keys():
            raise UserError(
                f"{cls.__name__}: `{min(old)}` of a task is gone. docs/changes.md has what to write in its place."
            )
        defining_class = next(base for base in cls.__mro__ if {"loss", "target_spec"} & vars(base).keys())
        if "target_spec" not in vars(defining_class):
            cls.target_spec = None

    @classmethod
    def check_metadata(cls, metadata: Mapping[str, Any]) -> None:
        if missing := [name for name in cls.needs if not metadata.get(name)]:
            raise UserError(
                f"the task {cls.__name__} needs {', '.join(missing)} in the `metadata` of the data; this data has "
                f"{', '.join(k for k in metadata if metadata[k]) or 'nothing'}. Choose a different task or data, or add it to the `metadata` of your "
                "data set. The classes of a torch Dataset are data.classes; those of a table are texts, or numbers from 0."
            )

    @classmethod
    def network_arguments(cls, metadata: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
        """Arguments available to the network, which gets those that its signature has. `keys`: those of the config's `task`."""
        return {"num_classes": len(metadata[cls.names])} if cls.names in cls.needs else {}

    @property
    def stage(self) -> str:
        """Like `Module.stage`, or the name of the additional evaluation set being evaluated, such as val/night."""
        if (stage := super().stage) == "train":
            return stage
        seeds = getattr(self.trainer.strategy, "seeds", None)  # without it, a plain Trainer
        return dict(enumerate(self.evaluation_sets(stage))).get(seeds.loader, stage) if seeds else stage

    @property
    def value_names(self) -> Sequence[Any]:
        """The names of the classes, labels, ...; empty if the data has none."""
        return self.metadata.get(self.names) or ()

    def outputs(self, net: Callable[..., Any], batch: Batch) -> Any:
        """The network's outputs for a batch. Only call `net`: its other methods would bypass the strategy."""
        return net(batch["input"])

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """loss_B: one number per sample."""
        raise NotImplementedError(f"{type(self).__name__} has no `loss`")

    def weight(self, batch: Mapping[str, Any]) -> Tensor | None:
        """weight_B, the weights of the samples in the mean over a global batch; None: equal weights."""
        return None

    def metrics(self) -> dict[str, Metric]:
        """Metrics of an evaluation by name, in addition to `loss` and `count`."""
        return {}

    def metric_arguments(self) -> dict[str, Any]:
        """Arguments available to the metrics of the config."""
        return {"num_classes": len(self.value_names)} if self.names in self.needs else {}

    def metric_inputs(self, output: Any, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a metric's `update`."""
        return output, batch["target"]

    def inputs_by_metric(self, output: Any, batch: Mapping[str, Any]) -> Mapping[str, tuple[Any, ...]]:
        """The arguments of metrics whose inputs differ from `metric_inputs`, by name."""
        return {}

    def predictions(self, output: Any) -> dict[str, Sequence[Any] | Tensor]:
        """Columns of the table of predictions, with a row per sample."""
        return dict(output) if isinstance(output, Mapping) else {"output": output}

    def targets(self, batch: Mapping[str, Any]) -> dict[str, Sequence[Any] | Tensor]:
        """Columns of a batch's targets; none if they do not fit into a cell."""
        target = batch["target"]
        return {"target": target} if losses.is_small(target, len(target)) and getattr(target, "ndim", 1) == 1 else {}

    def describe(self, output: Any, batch: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """What the report shows for each sample, by name: texts, numbers, a Mask, a Picture, Lines, Tokens."""
        columns: Any = {"target": batch.get("target"), **self.predictions(output)}
        count = len(batch["index"])
        small = {name: list(column) for name, column in columns.items() if losses.is_small(column, count)}
        cells = {name: [x.tolist() if isinstance(x, Tensor) else x for x in column] for name, column in small.items()}
        return [{name: column[row] for name, column in cells.items()} for row in range(count)]

    # --- The steps ---

    def forward(self, batch: Batch) -> Any:
        return self.outputs(self.net, batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.mean_loss(self(batch), batch)

    def mean_loss(self, output: Any, batch: Batch) -> Tensor:
        """The mean of `loss` over the global batch, like `mean`. Logged as train/loss."""
        if self.float32_head and getattr(output, "itemsize", 4) == 2 and "mixed" in self.trainer.precision:
            log_once(  # because a different layer than the assumed last layer computes them
                f"predictions have about 3 significant digits in {self.trainer.precision}: the last layer of {type(self.net).__name__}, "
                f"{type(optim.head_of(self.net)).__name__}, does not compute its outputs. Set trainer.precision=32-true, or add a `get_classifier` that "
                "returns the layer that does."
            )
        return self.mean_of(*losses.weighted_loss(self, output, batch), "train/loss")

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        optimizers = self.trainer.optimizers  # `global_step` counts the steps of all
        if (self.trainer.global_step // len(optimizers) + 1) % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]  # set by the Trainer's connector
            largest = max(group["lr"] for group in optimizer.param_groups)  # layers may have lower ones
            self.log(f"lr-{optimizers.index(optimizer)}" if len(optimizers) > 1 else "train/lr", largest)

    def evaluation_sets(self, stage: str) -> list[str]:
        """The evaluation sets of a stage, in the order of their dataloaders."""
        with suppress(RuntimeError, AttributeError):  # no Trainer, or other data than the kit's
            return self.trainer.datamodule.evaluated_parts(stage)  # type: ignore[attr-defined, no-any-return]
        return [stage]

    def new_metrics(self) -> dict[str, Metric]:
        """`metrics`, and those of the config."""
        found = {**self.metrics()}
        if taken := {"loss", "count"} & {*found, *self.further_metrics}:
            raise UserError(f"task={type(self).__name__}: `metrics` returns {min(taken)}, which every task logs.")
        return found | {name: make(self.metric_arguments()) for name, make in self.further_metrics.items()}

    def measured(self, part: str) -> Measured:
        """The mean loss and the metrics of an evaluation set: some metrics keep state from earlier evaluations."""
        part = part if "/" in part else "val"
        if part not in self.evaluated:
            self.evaluated[part] = Measured.of(self, self.new_metrics())
        return self.evaluated[part]

    def on_validation_start(self) -> None:
        """Creates the metrics: their states are copied to the device."""
        for part in self.evaluation_sets(super().stage):
            self.measured(part)

    on_test_start = on_validation_start

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.update_metrics(self(batch), batch, batch_idx, dataloader_idx)

    test_step = validation_step

    def update_metrics(self, output: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Updates the mean loss and the metrics. Returns `output` and `loss`, which the report shows if a test step returns them."""
        output = losses.float32(output)
        measured = self.measured(self.evaluation_sets(super().stage)[dataloader_idx])
        loss_B = losses.one_per_sample(self.loss(output, batch), self, batch)
        inputs = self.inputs_by_metric(output, batch)
        if unknown := inputs.keys() - measured.metrics.keys():
            raise UserError(
                f"`inputs_by_metric` has {min(unknown)}, but the metrics are {', '.join(measured.metrics)}."
            )
        every = {n: inputs[n] if n in inputs else self.metric_inputs(output, batch) for n in measured.metrics}
        measured.update(self, batch_idx, loss_B, losses.sample_weights(self, batch), every)
        return {"output": output, "loss": loss_B}

    def log_evaluation(self, stage: str) -> None:
        for part in self.evaluation_sets(stage):
            self.measured(part).log(self, part, self.value_names)

    def on_validation_epoch_end(self) -> None:
        self.log_evaluation(super().stage)

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[Any, Batch]:
        """The network's outputs, in float32, and the batch."""
        return losses.float32(self(batch)), batch

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"}}


# --- What the tasks check: targets, outputs, factors of a loss ---

AT_ONCE = 2**22  # most elements that are checked at once


@dataclass(frozen=True)
class Targets:
    """The targets that a task expects. Whole numbers start at `minimum` and index the names, unless `maximum` is set."""

    what: str  # description of one sample's target, for messages
    dims: int | None  # dimensions of one sample's target; None: any
    integer: bool = True
    minimum: float = 0
    maximum: float | None = None
    ignored: int | None = None  # a number that is excluded from loss and metrics
    hint: str = ""

    def wrong(self, target_N: NDArray[Any], names: int) -> tuple[int, str] | None:
        """The index of the first sample with an invalid target, and a description of that target."""
        high = names - 1 if self.maximum is None else self.maximum
        ignored = "" if self.ignored is None else f", or {self.ignored}"
        limits = f"{f' from 0 to {high}' if self.integer else ''}{ignored}"
        expected = f"expected {self.what}{limits}. Correct it, or remove the sample{self.hint}; for different targets, set a different task."
        if self.dims not in (None, target_N.ndim - 1) or target_N.dtype.kind not in "biuf":
            return 0, f"{target_N.dtype} of shape {target_N.shape[1:]}; {expected}"
        rows = max(1, AT_ONCE * len(target_N) // max(1, target_N.size))  # masks may be too large for memory
        for first in range(0, len(target_N), rows):
            block = target_N[first : first + rows]
            is_wrong = ~(np.isfinite(block) & (block >= self.minimum) & (block <= high) | (block == self.ignored))
            if self.integer and block.dtype.kind == "f":
                is_wrong |= block != np.trunc(block)
            if is_wrong.any():
                return first + int(np.argwhere(is_wrong)[0, 0]), f"{block[is_wrong][0]}; {expected}"
        return None


def validate_outputs(output: Tensor, *shape: int) -> None:
    """Raises UserError if a network's output has a different shape."""
    if output.shape != shape:
        raise UserError(
            f"the network returns shape {tuple(output.shape)}, but the task and the data need {shape}. Choose a different model, or set its number of outputs to what the data needs."
        )


def loss_factors(task: Any, name: str, factors: Sequence[float] | None) -> Tensor | None:
    """The factors of a loss. Raises UserError if there is not one for each class or label."""
    if factors is not None and len(factors) != len(task.value_names):
        raise UserError(
            f"task.{name} has {len(factors)} numbers; the data has {len(task.value_names)} {task.names}. Set one number for each."
        )
    return None if factors is None else torch.tensor(factors, dtype=torch.float32)
