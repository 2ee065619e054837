"""The LightningModule of every task. Devices and communication are the strategy's business."""

# B batch

import inspect
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import Metric

from lockstep.compat.metric_states import exact_on, of_all_processes, prepare, update
from lockstep.data.dataset import Batch
from lockstep.errors import UserError
from lockstep.tasks import Task
from lockstep.training.arithmetic import (
    StepArithmetic,
    clip_by_norm,
    completes_step,
    has_row,
    scale_gradients,
    total_steps,
)
from lockstep.training.losses import (
    evaluation_loss,
    one_per_sample,
    weight_of,
    weighted_loss,
    whole_batch,
    without_fillers,
)
from lockstep.training.metrics import MeanLoss, TestPanels, named
from lockstep.training.optim import begin_momentum, head_of
from lockstep.training.schedules import scheduler

log = logging.getLogger("lockstep")


def call_own_train(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Calls a custom `train` of each module that has one: it may keep a part in evaluation mode, or do more."""
    for module, training in modes:
        if type(module).train is not nn.Module.train:
            module.train(training)


class TaskModule(pl.LightningModule):
    """Trains `net` on a task.

    `parallelize` gets the network once, before the optimizer is created, and returns what to call instead of it.
    """

    of_task = True  # takes named batches with fillers, unlike other LightningModules

    def __init__(
        self,
        net: nn.Module,
        task: Task,
        *,
        optimizer: Callable[..., Optimizer],
        parameters: Callable[[nn.Module], Any] = nn.Module.parameters,
        schedule: Callable[..., LRScheduler],
        parallelize: Callable[[nn.Module, pl.Trainer], Callable[..., Any]],
        metrics: dict[str, Metric],
        network_arguments: dict[str, Any],
        arithmetic: StepArithmetic | None = None,
    ) -> None:
        super().__init__()
        call_own_train((module, module.training) for module in net.modules())
        self.net, self.task, self.network_arguments = net, task, network_arguments
        self.make_optimizer, self.make_schedule, self.parallelize = optimizer, schedule, parallelize
        self.parameters_of = parameters
        self.call_net: Callable[..., Any] | None = None
        self.arithmetic = arithmetic or StepArithmetic()
        self.mean_loss = MeanLoss(self.arithmetic.evaluation_sums)
        # No children: checkpoints would hold a metric's own network, and DDP wait for its gradients.
        self.metrics = metrics
        self.test_panels: TestPanels | None = None  # of the test at the end of a run
        # Sums of mean losses and of mean weights over the micro-batches since the last log row.
        self.window_loss: Tensor | float = 0.0
        self.window_weight: Tensor | float = 0.0
        self.began = False  # whether this process has computed a training batch
        self.step_weight: Tensor | None = None  # of the current global batch, a sum over micro-batches

    def on_validation_model_eval(self) -> None:
        self.modes = [(module, module.training) for module in self.modules()]
        super().on_validation_model_eval()

    def on_validation_model_train(self) -> None:
        """Lightning 2.6 only sets `training`, where a network's own `train` may undo what it did for the evaluation, such as a merge."""
        call_own_train(self.modes)
        for module, training in self.modes:
            module.training = training

    def configure_model(self) -> None:
        """Lightning's hook for changing the network before the optimizer sees its parameters; called by fit and test."""
        if self.call_net is None:
            call = self.parallelize(self.net, self.trainer)
            # a method, because a module would be registered as a child
            self.call_net = call.__call__ if isinstance(call, nn.Module) else call

    def forward(self, batch: Batch) -> Any:
        return self.task.outputs(self.call_net or self.net, batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        output = self(batch)
        if not self.began:
            self.began = True
            self.warn_of_rounding(output)
        loss_B, weight_B = weighted_loss(self.task, *whole_batch(self.task, output, batch, self.trainer))
        loss = loss_B.mean()
        # Sums of float32 in float64 are exact, unless one is 10^6 times another: so neither a checkpoint, which adds up processes,
        # nor their number changes a row.
        self.window_loss += loss.detach().float().to(exact_on(self.device))
        weight: Any = 1.0 if weight_B is None else weight_B.float().mean().to(exact_on(self.device))
        self.window_weight += weight
        if weight_B is not None:
            self.step_weight = weight + (0.0 if self.step_weight is None else self.step_weight)
        if completes_step(self.trainer, batch_idx) and has_row(self.trainer, self.trainer.global_step + 1):
            # The mean over the global batches since the last row; the only communication about the loss.
            loss_sum, weight_sum = self.window()
            # On the host: Lightning reads what a progress bar shows again in each step, which would wait for a GPU.
            self.log("train/loss", (loss_sum / weight_sum).float().cpu(), prog_bar=True)
            self.window_loss = self.window_weight = 0.0
            self.log("train/lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def warn_of_rounding(self, output: Any) -> None:
        """A network may compute its outputs elsewhere than in what is taken for its last layer."""
        half = isinstance(output, Tensor) and output.is_floating_point() and output.element_size() < 4
        if self.task.float32_head and half and self.trainer.precision in ("bf16-mixed", "16-mixed"):
            log.warning(
                "predictions have about 3 significant digits in %s: the last layer of %s, %s, does not make its outputs. Set "
                "trainer.precision=32-true, or add `get_classifier`, which returns the layer that does.",
                self.trainer.precision, type(self.net).__name__, type(head_of(self.net)).__name__,
            )  # fmt: skip

    def window(self) -> Tensor:
        """Loss and weight since the last log row, over all processes."""
        sums, exact = (self.window_loss, self.window_weight), exact_on(self.device)
        both = torch.stack([torch.as_tensor(x, dtype=exact, device=self.device) for x in sums])
        return torch.as_tensor(self.trainer.strategy.reduce(both, reduce_op="mean"))

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if self.step_weight is None and not gradient_clip_val:
            return
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        if self.step_weight is not None:  # gradients are of the mean of loss x weight
            mean = self.trainer.strategy.reduce(self.step_weight.clone(), reduce_op="mean")
            scale = self.trainer.accumulate_grad_batches / mean
            scale_gradients(grads, scale.where(mean > 0, 0.0))  # a batch with a total weight of 0
            self.step_weight = None
        if gradient_clip_val:
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            # unscaled within the step otherwise, after clipping
            if scaler is not None and optimizer.defaults.get("fused"):
                scaler.unscale_(optimizer)
            if gradient_clip_algorithm == "value":
                nn.utils.clip_grad_value_(self.parameters(), gradient_clip_val)
            else:
                clip_by_norm(grads, gradient_clip_val, self.arithmetic)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        begin_momentum(optimizer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The window since the last row of the log is reduced first, so the run can resume with another world size.

        Always: a process in whose samples nothing counts must take part as well.
        """
        self.window_loss, self.window_weight = self.window().tolist()
        checkpoint["window"] = {"loss": self.window_loss, "weight": self.window_weight}
        checkpoint["network"] = self.network_arguments

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # The window sums over micro-batches.
        scale = self.trainer.accumulate_grad_batches / checkpoint["accumulate_grad_batches"]
        self.window_loss = checkpoint["window"]["loss"] * scale
        self.window_weight = checkpoint["window"]["weight"] * scale

    def on_validation_start(self) -> None:
        """Makes metrics sum exactly, even if `trainer.precision=bf16-true` has converted the module."""
        for metric in self.all_metrics:
            prepare(metric, self.device)

    def on_test_start(self) -> None:
        self.on_validation_start()
        if self.test_panels:
            self.test_panels.begin(self.device)

    def evaluation_step(self, batch: Batch, batch_idx: int) -> None:
        """Updates the metrics with real samples; fillers are dropped before the task sees them."""
        output = self(batch)
        whole = evaluation_loss(self.task, output, batch, self)
        if not batch["count"]:
            return
        output, batch = without_fillers(output, batch)
        loss_B = one_per_sample(self.task.loss(output, batch), self.task, batch) if whole is None else whole
        self.mean_loss.update(loss_B, weight_of(self.task, batch), self.arithmetic.evaluation_sum(self, batch_idx))
        for metric in self.metrics.values():
            update(metric, batch_idx, *self.task.metric_inputs(output, batch))
        if self.test_panels and self.trainer.testing:
            self.test_panels.update(output, batch, loss_B, batch_idx)

    validation_step = test_step = evaluation_step

    def log_evaluation(self, stage: str) -> None:
        with of_all_processes(self.all_metrics):
            found = self.mean_loss.compute()
            for name, metric in self.metrics.items():
                found |= named(name, metric.compute(), self.task.value_names)
        self.log_dict({f"{stage}/{name}": value for name, value in found.items()}, prog_bar=False)
        for metric in self.all_metrics:
            metric.reset()

    @property
    def all_metrics(self) -> list[Metric]:
        return [self.mean_loss, *self.metrics.values()]

    def on_validation_epoch_end(self) -> None:
        self.log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self.log_evaluation("test")
        if self.test_panels:
            self.test_panels.finish(self)

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[Any, Batch]:
        """The network's outputs and the batch, without fillers."""
        return without_fillers(self(batch), batch)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.arithmetic.prepared(self.new_optimizer(), self.device)
        schedule = scheduler(self.make_schedule, optimizer, total_steps(self.trainer))
        if isinstance(schedule, ReduceLROnPlateau):
            raise UserError(
                "schedule: ReduceLROnPlateau waits for a validation, and a task's schedule changes at optimizer steps. "
                "Set schedule=cosine, or name a different class of torch.optim.lr_scheduler."
            )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def new_optimizer(self, net: nn.Module | None = None) -> Optimizer:
        """Of the network's parameters; a function of the user's may ask for `named_parameters`, to treat some differently."""
        net, make = self.net if net is None else net, self.make_optimizer
        if any(p.is_meta for p in net.parameters()) and getattr(make, "keywords", {}).get("fused"):
            make = partial(make, fused=False)  # fused optimizers refuse meta tensors
        if "named_parameters" in inspect.signature(make).parameters:
            return make(named_parameters=list(net.named_parameters()))
        return make(self.parameters_of(net))
