"""Stops a run that watches a figure which nothing logs. config/components.py refuses what is known before the run."""

from collections.abc import Callable

from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig

from lockstep.config.words import nearest
from lockstep.errors import TrainingFailed
from lockstep.training.module import TaskModule


class Monitored(Callback):
    """Fails after the first validation, or at the end of training for callbacks that may look later; saves a checkpoint first.

    A training that ends before its first validation logs no figure of one, and passes.
    """

    def __init__(self, cfg: DictConfig, save: Callable[[Trainer], None] | None) -> None:
        self.save, self.validated = save, False
        self.early = {"checkpoint.monitor": cfg.checkpoint.monitor} if save and cfg.checkpoint.monitor else {}
        self.late: dict[str, str] = {}
        for name, node in cfg.callbacks.items():
            if node.get("monitor") is not None:
                validates = node.get("check_on_train_epoch_end") is False
                (self.early if validates else self.late)[f"callbacks.{name}.monitor"] = node.monitor

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validated = True
            self.refuse(trainer, self.early)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.validated:
            self.refuse(trainer, self.late)

    def refuse(self, trainer: Trainer, watched: dict[str, str]) -> None:
        found = sorted(trainer.callback_metrics)
        for key, monitor in watched.items():
            if monitor in found:
                continue
            if self.save:
                self.save(trainer)
            module, goes_on = trainer.lightning_module, " resume=auto to continue" if self.save else ""
            name = type(module.task if isinstance(module, TaskModule) else module).__name__
            last = ", or checkpoint.monitor=null to keep the last checkpoint only" * (key == "checkpoint.monitor")
            raise TrainingFailed(
                f"{key}={monitor} is not logged by {name}, which logs {', '.join(found) or 'nothing'}{nearest(monitor, found)}. "
                f"Type {key}=<one of them>{goes_on}{last}."
            )
