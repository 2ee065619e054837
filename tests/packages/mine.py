"""Tasks and metrics of a user's with mistakes in them, for tests/training/test_first_step.py."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanSquaredError, Metric

from lockstep.kit.task import Task
from lockstep.kit.tasks import Classification


class Twelve(nn.Sequential):
    """Two outputs more than there are classes."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(144, 12))


class Scalar(Classification):
    def loss(self, output, batch):
        return cross_entropy(output, batch["target"])


class Wide(Classification):
    def loss(self, output, batch):
        return output.square()


class Column(Classification):
    def weight(self, batch):
        return torch.ones(len(batch["index"]), 1)


class Replaced(Classification):
    def metrics(self):
        return {**super().metrics(), "loss": MeanSquaredError()}


class Bare(Task):
    @classmethod
    def network_arguments(cls, metadata, **keys):
        return {"num_classes": 10}

    def loss(self, output, batch):
        return cross_entropy(output, batch["target"], reduction="none")


class Unfinished(Metric):
    def update(self, output, target):
        self.seen = output

    def compute(self):
        return self.sen.mean()


class Curve(Unfinished):
    def compute(self):
        return self.seen[0], self.seen[1]


class Needy(Metric):
    """Computes nothing of fewer than `least` samples, as KernelInceptionDistance."""

    def __init__(self, least):
        super().__init__()
        self.least, self.count = least, 0

    def update(self, output, target):
        self.count += len(output)

    def compute(self):
        assert self.count >= self.least, "too few samples"
        return 1.0
