"""A LightningModule with a loss per sample: its means, its metrics, and what the report shows of them."""

# B batch

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric, MetricCollection

from lockstep.compat.metric_states import of_all_processes, prepare, update
from lockstep.data.dataset import Batch
from lockstep.errors import UserError
from lockstep.training.arithmetic import is_logging_step
from lockstep.training.losses import (
    Plain,
    float32,
    is_small,
    one_per_sample,
    sample_weights,
    weighted_loss,
)
from lockstep.training.metrics import MeanLoss, named_values
from lockstep.training.module import Module, arithmetic_of, log_reduced, strategy_of, trainer_of
from lockstep.training.optim import compute_in_float32, head_of

HALF = (torch.bfloat16, torch.float16)
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
        self.evaluated: dict[str, tuple[MeanLoss, dict[str, Metric]]] = {}
        if self.float32_head:
            compute_in_float32(head_of(net))

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
        stage, seeds = super().stage, getattr(strategy_of(self), "seeds", None)
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
        if isinstance(target, Tensor):
            fits_cell = target.dim() == 1
        else:
            fits_cell = isinstance(target, list | tuple) and all(isinstance(x, Plain) for x in target)
        return {"target": target} if fits_cell else {}

    def describe(self, output: Any, batch: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """What the report shows for each sample, by name: texts, numbers, a Mask, a Picture, Lines, Tokens."""
        columns: dict[str, Any] = {"target": batch.get("target"), **self.predictions(output)}
        count = len(batch["index"])
        small = {name: list(column) for name, column in columns.items() if is_small(column, count)}
        cells = {name: [x.tolist() if isinstance(x, Tensor) else x for x in column] for name, column in small.items()}
        return [{name: column[row] for name, column in cells.items()} for row in range(count)]

    # --- The steps ---

    def forward(self, batch: Batch) -> Any:
        return self.outputs(self.net, batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.mean_loss(self(batch), batch)

    def mean_loss(self, output: Any, batch: Batch) -> Tensor:
        """The mean of `loss` over the global batch, like `mean`. Logged as train/loss."""
        if self.float32_head and getattr(output, "dtype", None) in HALF and "mixed" in self.trainer.precision:
            log_once(  # because a different layer than the assumed last layer computes them
                f"predictions have about 3 significant digits in {self.trainer.precision}: the last layer of {type(self.net).__name__}, "
                f"{type(head_of(self.net)).__name__}, does not compute its outputs. Set trainer.precision=32-true, or add a `get_classifier` that "
                "returns the layer that does."
            )
        return self.mean_of(*weighted_loss(self, output, batch), "train/loss")

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if is_logging_step(self.trainer, self.trainer.global_step + 1):
            self.log("train/lr", max(group["lr"] for group in optimizer.param_groups))  # layers may have lower ones

    def evaluation_sets(self, stage: str) -> list[str]:
        """The evaluation sets of a stage, in the order of their dataloaders."""
        data = getattr(trainer_of(self), "datamodule", None)
        return getattr(data, "evaluated_parts", lambda stage: [stage])(stage)  # type: ignore[no-any-return]

    def new_metrics(self) -> dict[str, Metric]:
        """`metrics`, and those of the config. Raises UserError if `metrics` returns anything else."""
        found: Any = self.metrics()
        where, named = f"task={type(self).__name__}: `metrics` returns", (Mapping, MetricCollection)
        if not isinstance(found, named) or not all(isinstance(x, Metric | MetricCollection) for x in found.values()):
            raise UserError(
                f"{where} {found}; expected a dict of torchmetrics metrics, such as {{'mean': MeanMetric()}}."
            )
        found = dict(found.items())
        if taken := ", ".join(sorted({"loss", "count"} & {*found, *self.further_metrics})):
            raise UserError(f"{where} {taken}, which every task already logs. Use a different name.")
        return found | {name: make(self.metric_arguments()) for name, make in self.further_metrics.items()}

    def measured(self, part: str) -> tuple[MeanLoss, dict[str, Metric]]:
        """The mean loss and the metrics of an evaluation set: some metrics keep state from earlier evaluations."""
        part = part if "/" in part else "val"
        if part not in self.evaluated:
            mean_loss, metrics = MeanLoss(arithmetic_of(self).evaluation_sums), self.new_metrics()
            for metric in (mean_loss, *metrics.values()):
                prepare(metric, self.device)  # sums exactly
            if part.partition("/")[2] in metrics:
                raise UserError(f"evaluation_sets: {part!r} is also the name of a metric. Use a different name.")
            self.evaluated[part] = mean_loss, metrics
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
        output = float32(output)
        if dataloader_idx >= len(sets := self.evaluation_sets(super().stage)):
            raise UserError(
                f"{type(self).__name__} got several dataloaders. Give one, or the `evaluation_sets` of a data set."
            )
        mean_loss, metrics = self.measured(sets[dataloader_idx])
        loss_B = one_per_sample(self.loss(output, batch), self, batch)
        mean_loss.update(loss_B, sample_weights(self, batch), arithmetic_of(self).evaluation_sum(self, batch_idx))
        inputs = self.inputs_by_metric(output, batch)
        if unknown := sorted(inputs.keys() - metrics.keys()):
            raise UserError(f"`inputs_by_metric` has {unknown[0]}, but the metrics are {', '.join(metrics)}.")
        for name, metric in metrics.items():
            update(metric, batch_idx, *(inputs[name] if name in inputs else self.metric_inputs(output, batch)))
        return {"output": output, "loss": loss_B}

    def log_evaluation(self, stage: str) -> None:
        for part in self.evaluation_sets(stage):
            mean_loss, metrics = self.measured(part)
            with of_all_processes([mean_loss, *metrics.values()]):
                values = mean_loss.compute()
                for name, metric in metrics.items():
                    values |= named_values(name, metric.compute(), self.value_names)
            log_reduced(self, {f"{part}/{name}": value for name, value in values.items()})
            for metric in (mean_loss, *metrics.values()):
                metric.reset()

    def on_validation_epoch_end(self) -> None:
        self.log_evaluation("test" if self.trainer.testing else "val")

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[Any, Batch]:
        """The network's outputs, in float32, and the batch."""
        return float32(self(batch)), batch

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"}}
