"""Modules with schedules of every kind, for tests/training/test_schedules.py."""

import json
from pathlib import Path
from typing import Any

import torch
from kept import Plain
from torch import nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler

from lockstep.kit import schedules


class Warmed(lr_scheduler.LRScheduler):
    """A class of one's own, which multiplies the rate that there is."""

    def __init__(self, optimizer: Optimizer, total_steps: int) -> None:
        self.total_steps = total_steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        growth = 1.0 if self.last_epoch == 0 else 1 + 1 / (self.total_steps + self.last_epoch)
        return [group["lr"] * growth for group in self.optimizer.param_groups]


def schedule(name: str, optimizer: Optimizer, total: int) -> Any:
    """Each depends on the length of the run."""
    torchs, half = lr_scheduler, total // 2
    made = {
        "lambda": lambda: torchs.LambdaLR(optimizer, lambda step: 1 - step / (total + 1)),
        "multiplicative": lambda: torchs.MultiplicativeLR(optimizer, lambda _: 1 - 1 / total),
        "step": lambda: torchs.StepLR(optimizer, half),
        "multistep": lambda: torchs.MultiStepLR(optimizer, [total // 4, half]),
        "constant": lambda: torchs.ConstantLR(optimizer, 0.1, total_iters=half),
        "linear": lambda: torchs.LinearLR(optimizer, 1.0, 0.1, total_iters=total),
        "exponential": lambda: torchs.ExponentialLR(optimizer, 0.01 ** (1 / total)),
        "polynomial": lambda: torchs.PolynomialLR(optimizer, total, 2.0),
        "cosine": lambda: torchs.CosineAnnealingLR(optimizer, total, 1e-4),
        "restarts": lambda: torchs.CosineAnnealingWarmRestarts(optimizer, half),
        "cyclic": lambda: torchs.CyclicLR(optimizer, 0.01, 0.1, step_size_up=half),
        "onecycle": lambda: torchs.OneCycleLR(optimizer, 0.1, total_steps=total),
        "onecycle_adam": lambda: torchs.OneCycleLR(optimizer, 0.1, total_steps=total, three_phase=True),
        "sequential": lambda: torchs.SequentialLR(
            optimizer,
            [torchs.LinearLR(optimizer, 0.1, total_iters=half), torchs.CosineAnnealingLR(optimizer, total - half)],
            [half],
        ),
        "chained": lambda: torchs.ChainedScheduler(
            [torchs.LinearLR(optimizer, 0.1, total_iters=half), torchs.ExponentialLR(optimizer, 0.01 ** (1 / total))]
        ),
        "nested": lambda: torchs.ChainedScheduler(
            [schedule("sequential", optimizer, total), torchs.StepLR(optimizer, half)]
        ),
        "own": lambda: Warmed(optimizer, total),
        "lockstep_cosine": lambda: schedules.cosine(optimizer, total, warmup_steps=0.1),
        "lockstep_exponential": lambda: schedules.exponential(optimizer, total),
    }
    return made[name]()


NAMES = ("lambda", "multiplicative", "step", "multistep", "constant", "linear", "exponential", "polynomial", "cosine", "restarts", "cyclic",
         "onecycle", "onecycle_adam", "sequential", "chained", "nested", "own", "lockstep_cosine", "lockstep_exponential")  # fmt: skip


class Every(Plain):
    """Each schedule has its own optimizer, and steps with it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.extra = nn.ParameterList([torch.zeros(1) for _ in NAMES])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) + sum(p.square().sum() for p in self.extra)
        self.manual_backward(loss)
        rates: dict[str, float] = {}
        for name, optimizer, stepped in zip(NAMES, self.optimizers(), self.lr_schedulers(), strict=True):
            rates[name] = optimizer.param_groups[0]["lr"]
            optimizer.step()
            optimizer.zero_grad()
            stepped.step()
        with (Path(self.trainer.default_root_dir) / "rates.jsonl").open("a") as file:  # curves in a report take seconds
            file.write(json.dumps(rates) + "\n")

    def configure_optimizers(self):
        total, made = int(self.trainer.estimated_stepping_batches), []
        for name, p in zip(NAMES, self.extra, strict=True):
            groups: Any = [{"params": [p], "lr": 0.1}]
            if name == "lambda":
                groups.append({"params": self.body.parameters(), "lr": 0.01})
            optimizer = Adam(groups) if name.endswith("adam") else SGD(groups, momentum=0.9)
            made.append({"optimizer": optimizer, "lr_scheduler": schedule(name, optimizer, total)})
        return made


class One(Plain):
    """One schedule, in automatic optimization; `by_hand` has none."""

    def __init__(self, kind: str, interval: str = "step", lr: float = 0.1, patience: int = 0) -> None:
        super().__init__()
        self.kind, self.interval, self.lr, self.patience = kind, interval, lr, patience

    def training_step(self, batch, batch_idx):
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return self.loss(batch)

    def on_train_epoch_end(self):
        if self.kind == "by_hand":
            self.optimizers().param_groups[0]["lr"] /= 2

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("worse", float(self.current_epoch))

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), self.lr)
        total = self.trainer.estimated_stepping_batches
        total = int(total) if self.interval == "step" else self.trainer.max_epochs
        if self.kind == "by_hand":
            return optimizer
        if self.kind == "timm":
            from timm.scheduler import CosineLRScheduler

            made: Any = CosineLRScheduler(optimizer, total, t_in_epochs=self.interval == "epoch")
        elif self.kind == "plateau":
            made = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=self.patience)
        else:
            made = schedule(self.kind, optimizer, total)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": made, "interval": self.interval, "monitor": "worse"},
        }

    def lr_scheduler_step(self, scheduler, metric):
        if self.kind != "timm":
            super().lr_scheduler_step(scheduler, metric)
        elif self.interval == "epoch":
            scheduler.step(self.current_epoch + 1)
        else:
            scheduler.step_update(self.global_step)
