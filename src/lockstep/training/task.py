"""The LightningModule of every task: a loss per sample, metrics, and what the report shows.

It does not depend on devices or strategies.
"""

# B batch

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import Metric

from lockstep.compat.metric_states import of_all_processes, prepare, update
from lockstep.data.dataset import Batch
from lockstep.errors import UserError
from lockstep.kit.panels import Panel
from lockstep.training.arithmetic import is_logging_step, total_steps
from lockstep.training.losses import (
    Plain,
    float32,
    is_small,
    one_per_sample,
    sample_weights,
    weighted_loss,
)
from lockstep.training.metrics import named_values
from lockstep.training.module import Module, RunParts, call_own_train, log_reduced
from lockstep.training.optim import begin_momentum, head_of, scheduler

log = logging.getLogger("lockstep")


class Task(Module):
    """Subclass it in your own file: override `loss`, and whatever else differs.

    The engine sets `metadata`, the data set's metadata, before it calls any method. It averages `loss` over the whole
    global batch and passes real samples only. Buffers move to the device; register them with persistent=False, so
    checkpoints contain only the network. A task is a LightningModule with automatic optimization: `self.trainer`,
    `self.global_step`, `self.current_epoch` and hooks such as `on_train_epoch_start` are Lightning's.
    """

    named_batches = True

    needs: ClassVar[tuple[str, ...]] = ()  # keys that `metadata` must have
    names: ClassVar[str] = "classes"  # the key of `metadata` that names the values of outputs and metrics
    titles: ClassVar[Mapping[str, tuple[str, str]]] = {}  # title and unit of curves in the report, by metric or `loss`
    # Turns outputs into predictions in exported networks: softmax, next_token, sigmoid or identity. Set it in a class
    # with different `predictions`. None: an exported network returns its outputs unchanged.
    activation: str | None = None
    # Under mixed precision, the network's last layer computes in float32, for outputs with more than 3 digits.
    float32_head: bool = False
    target_spec: Any = None  # checked before training, or when targets are read; None: any `target`
    metadata: Mapping[str, Any]
    net: nn.Module
    parts: RunParts

    def __init_subclass__(cls, **arguments: Any) -> None:
        """A class that overrides `loss` accepts any `target`, unless it also sets `target_spec`."""
        super().__init_subclass__(**arguments)
        defining_class = next(base for base in cls.__mro__ if {"loss", "target_spec"} & vars(base).keys())
        if "target_spec" not in vars(defining_class):
            cls.target_spec = None

    def bind(self, metadata: Mapping[str, Any]) -> None:
        """Raises UserError if `metadata` lacks a key that the task needs."""
        if missing := [name for name in self.needs if not metadata.get(name)]:
            raise UserError(
                f"the task {type(self).__name__} needs {', '.join(missing)} in the `metadata` of the data; this data has "
                f"{', '.join(k for k in metadata if metadata[k]) or 'nothing'}. Choose a different task or data, or add it to the `metadata` of your "
                "data set. The classes of a torch Dataset are data.classes; those of a table are texts, or numbers from 0."
            )
        self.metadata = metadata

    @property
    def stage(self) -> str:
        """Like `Module.stage`, or the name of the additional evaluation set being evaluated, such as val/night."""
        return (vars(self).get("parts") and self.parts.current) or super().stage

    @property
    def value_names(self) -> Sequence[Any]:
        """The names of the classes, labels, ...; empty if the data has none."""
        return self.metadata.get(self.names) or ()

    def model_kwargs(self) -> dict[str, Any]:
        """Arguments available to the network. It gets those that its signature has."""
        return {"num_classes": len(self.value_names)} if self.names in self.needs else {}

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
        return Task.model_kwargs(self)

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

    def top(self, output: Any, count: int) -> dict[str, Sequence[Any] | Tensor]:
        """Columns of the `count` most probable classes, for tasks that rank them: class, probability, class_2, ..."""
        raise NotImplementedError

    def primary_metric(self, report: Mapping[str, Any]) -> tuple[str, str]:
        """The name and value of the primary metric.

        This is the monitored metric, or the first of `metrics` if the loss or nothing is monitored.
        """
        metric = (report["monitor"] or "val/loss").removeprefix("val/")
        key = f"test/{next(iter(self.metrics()), 'loss') if metric == 'loss' else metric}"
        # a metric with several values has no value under its own name
        name = key if key in report else next((n for n in report if n.startswith(f"{key}/")), "test/loss")
        return name.replace("/", " "), f"{report[name]:.4f} on {report['test/count']:,} {report['unit']}"

    def interval(self, report: Mapping[str, Any]) -> tuple[float, float] | None:
        """The 95% interval of the primary metric, if there is a simple one."""
        return None

    def curves(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """The report's curves: title, unit, columns of metrics.csv."""
        columns = {"loss": ("train/loss", "val/loss"), **{name: (f"val/{name}",) for name in self.metrics()}}
        titles = {"loss": ("Loss", "loss"), **self.titles}
        return [(*titles.get(name, (name, name)), keys) for name, keys in columns.items()]

    def test_panels(self) -> dict[str, Panel]:
        """The report's panels about the test set, in addition to the samples with the largest losses."""
        return {}

    def describe(self, output: Any, batch: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """What the report shows for each sample, by name: texts, numbers, a Mask, a Picture, Lines, Tokens."""
        columns: dict[str, Any] = {"target": batch.get("target"), **self.predictions(output)}
        count = len(batch["index"])
        small = {name: list(column) for name, column in columns.items() if is_small(column, count)}
        cells = {name: [x.tolist() if isinstance(x, Tensor) else x for x in column] for name, column in small.items()}
        return [{name: column[row] for name, column in cells.items()} for row in range(count)]

    # --- What the engine calls ---

    def attach(self, net: nn.Module, **parts: Any) -> Self:
        """Sets a run's network and `RunParts`."""
        call_own_train((module, module.training) for module in net.modules())
        self.net, self.parts = net, RunParts(**parts)
        return self

    def on_validation_model_eval(self) -> None:
        self.parts.modes = [(module, module.training) for module in self.modules()]
        super().on_validation_model_eval()

    def on_validation_model_train(self) -> None:
        """Restores the training modes.

        Lightning 2.6 only sets `training`, but a network's custom `train` may have to undo work it did for the
        evaluation, such as a merge.
        """
        call_own_train(self.parts.modes)
        for module, training in self.parts.modes:
            module.training = training

    def forward(self, batch: Batch) -> Any:
        return self.outputs(self.net, batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        output = self(batch)
        return self.mean_loss(output, batch)

    def mean_loss(self, output: Any, batch: Batch) -> Tensor:
        """The mean of `loss` over the global batch, like `mean`. Logged as train/loss."""
        if not self.parts.began:
            self.parts.began = True
            self.warn_of_rounding(output)
        return self.mean_of(*weighted_loss(self, output, batch), "train/loss")

    def warn_of_rounding(self, output: Any) -> None:
        """Warns if outputs are rounded, because a different layer than the assumed last layer computes them."""
        is_half = isinstance(output, Tensor) and output.is_floating_point() and output.element_size() < 4
        if self.float32_head and is_half and self.trainer.precision in ("bf16-mixed", "16-mixed"):
            log.warning(
                "predictions have about 3 significant digits in %s: the last layer of %s, %s, does not compute its outputs. Set "
                "trainer.precision=32-true, or add a `get_classifier` that returns the layer that does.",
                self.trainer.precision, type(self.net).__name__, type(head_of(self.net)).__name__,
            )  # fmt: skip

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        begin_momentum(optimizer)
        if is_logging_step(self.trainer, self.trainer.global_step + 1):
            self.log("train/lr", max(group["lr"] for group in optimizer.param_groups))  # layers may have lower ones

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["network"] = self.parts.model_kwargs

    def on_validation_start(self) -> None:
        """Makes metrics sum exactly, even if `trainer.precision=bf16-true` has converted the module."""
        for mean_loss, metrics in self.parts.evaluated.values():
            for metric in (mean_loss, *metrics.values()):
                prepare(metric, self.device)

    def on_test_start(self) -> None:
        self.on_validation_start()
        if self.parts.test_panels:
            self.parts.test_panels.begin(self.device)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        output = self(batch)
        self.update_metrics(output, batch, batch_idx, dataloader_idx)

    def update_metrics(self, output: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Updates the mean loss and the metrics."""
        parts, output = self.parts, float32(output)
        mean_loss, metrics = parts.evaluated[parts.current or "val"]
        loss_B = one_per_sample(self.loss(output, batch), self, batch)
        mean_loss.update(loss_B, sample_weights(self, batch), parts.arithmetic.evaluation_sum(self, batch_idx))
        inputs = self.inputs_by_metric(output, batch)
        if unknown := sorted(inputs.keys() - metrics.keys()):
            raise UserError(f"`inputs_by_metric` has {unknown[0]}, but the metrics are {', '.join(metrics)}.")
        for name, metric in metrics.items():
            update(metric, batch_idx, *(inputs[name] if name in inputs else self.metric_inputs(output, batch)))
        if parts.test_panels and self.trainer.testing and not dataloader_idx:
            parts.test_panels.update(output, batch, loss_B, batch_idx)

    test_step = validation_step

    def on_validation_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Sets the evaluation set that `stage` and `update_metrics` use."""
        self.parts.current = self.parts.of_stage(super().stage)[dataloader_idx] if dataloader_idx else ""

    on_test_batch_start = on_validation_batch_start

    def log_evaluation(self, stage: str) -> None:
        self.parts.current = ""
        for part in self.parts.of_stage(stage):
            mean_loss, metrics = self.parts.evaluated[part]
            with of_all_processes([mean_loss, *metrics.values()]):
                values = mean_loss.compute()
                for name, metric in metrics.items():
                    values |= named_values(name, metric.compute(), self.value_names)
            log_reduced(self, {f"{part}/{name}": value for name, value in values.items()})
            for metric in (mean_loss, *metrics.values()):
                metric.reset()

    def on_validation_epoch_end(self) -> None:
        self.log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self.log_evaluation("test")
        if self.parts.test_panels:
            self.parts.test_panels.finish()

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[Any, Batch]:
        """The network's outputs, in float32, and the batch."""
        return float32(self(batch)), batch

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.parts.arithmetic.prepared(self.new_optimizer(), self.device)
        schedule = scheduler(self.parts.schedule, optimizer, total_steps(self.trainer))
        if isinstance(schedule, ReduceLROnPlateau):
            raise UserError(
                "schedule: ReduceLROnPlateau steps after a validation, but a task's schedule steps after each optimizer step. "
                "Set schedule=cosine, or choose a different class of torch.optim.lr_scheduler."
            )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def new_optimizer(self, net: nn.Module | None = None) -> Optimizer:
        """An optimizer of the network's parameters. A user's function may take `named_parameters`, to group them."""
        net, make = self.net if net is None else net, self.parts.optimizer
        if any(p.is_meta for p in net.parameters()) and getattr(make, "keywords", {}).get("fused"):
            make = partial(make, fused=False)  # fused optimizers do not support meta tensors
        if "named_parameters" in inspect.signature(make).parameters:
            return make(named_parameters=list(net.named_parameters()))
        return make(self.parts.parameters(net))
