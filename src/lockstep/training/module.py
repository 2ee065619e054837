"""The task: loss, metrics, optimizer. What runs on which device, and how replicas agree, is the strategy's."""

# B batch · C channel · H W pixel · K class

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.training.gradients import clip_grad_norm
from lockstep.training.metrics import Evaluation
from lockstep.training.steps import completes_step, has_row

Batch = tuple[Tensor, Tensor]  # image_BCHW, label_B


class Classification(pl.LightningModule):
    """Trains `net` to give the logits of the right class.

    `parallelize` gets the network once, before the optimizer is made, and returns what is called in its place.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: Callable[..., Optimizer],
        schedule: Callable[[Optimizer, float], LRScheduler],
        parallelize: Callable[[nn.Module, pl.Trainer], Callable[[Tensor], Tensor]],
        config: dict[str, Any],
    ) -> None:
        super().__init__()
        self.save_hyperparameters(config)  # plain values: into every checkpoint, and to the loggers
        self.net = net
        self.make_optimizer, self.make_schedule, self.parallelize = optimizer, schedule, parallelize
        self.call_net: Callable[[Tensor], Tensor] | None = None
        self.evaluation = Evaluation()
        self.window_loss: Tensor | float = 0.0  # summed over the micro-batches since the last row of the log
        self.window_count = 0

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes each hook under this name, 46 times a step; nn.Module takes 2 us to see what it is.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def configure_model(self) -> None:
        """Lightning's hook for changing the network before the optimizer sees its parameters; called by fit and test."""
        if self.call_net is None:
            call = self.parallelize(self.net, self.trainer)
            # A method is not registered as a child.
            self.call_net = call.__call__ if isinstance(call, nn.Module) else call

    def forward(self, image_BCHW: Tensor) -> Tensor:
        return self.call_net(image_BCHW) if self.call_net is not None else self.net(image_BCHW)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        image_BCHW, label_B = batch
        loss = F.cross_entropy(self(image_BCHW), label_B)
        self.window_loss += loss.detach()
        self.window_count += 1
        if completes_step(self.trainer, batch_idx) and has_row(self.trainer, self.trainer.global_step + 1):
            # The mean over the global batches since the last row; only here do the processes talk about it.
            self.log("train/loss", self.window_loss / self.window_count, prog_bar=True, sync_dist=True)
            self.window_loss, self.window_count = 0.0, 0
        return loss

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if gradient_clip_val is None or gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            clip_grad_norm(self.parameters(), gradient_clip_val)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The window since the last row of the log, on which the processes agree here: it may go on under other ones."""
        if isinstance(self.window_loss, Tensor):
            self.window_loss = self.trainer.strategy.reduce(self.window_loss, reduce_op="mean")
        checkpoint["window"] = {"loss": float(self.window_loss), "count": self.window_count}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        then = checkpoint["hyper_parameters"]["trainer"]["accumulate_grad_batches"]
        scale = self.trainer.accumulate_grad_batches / then  # the window counts micro-batches
        self.window_loss = checkpoint["window"]["loss"] * scale
        self.window_count = round(checkpoint["window"]["count"] * scale)

    def evaluation_step(self, batch: Batch) -> None:
        image_BCHW, label_B = batch
        self.evaluation.update(self(image_BCHW), label_B)

    def log_evaluation(self, stage: str) -> None:
        figures = self.evaluation.compute()
        self.log_dict({f"{stage}/{name}": value for name, value in figures.items()}, prog_bar=False)
        self.evaluation.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluation_step(batch)

    def on_validation_epoch_end(self) -> None:
        self.log_evaluation("val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluation_step(batch)

    def on_test_epoch_end(self) -> None:
        self.log_evaluation("test")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.make_optimizer(self.parameters())
        schedule = self.make_schedule(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
