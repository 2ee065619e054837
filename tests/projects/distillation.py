"""A small network learns the classes, and what a large one makes of the samples."""

# B batch · F feature · K class
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from lockstep import Arrays, DataSet
from lockstep.kit.tasks import Classification


def pretrained() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))


class Points(DataSet):
    unit = "points"

    def __init__(self, *, count: int = 90) -> None:
        point_NF = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            class_N = pretrained().eval()(point_NF).argmax(1)
        test = count // 5
        self.train = Arrays(input=point_NF[test:].numpy(), target=class_N[test:].numpy())
        self.test = Arrays(input=point_NF[:test].numpy(), target=class_N[:test].numpy())
        self.metadata = {"classes": ["north", "east", "south", "west"]}


class Student(nn.Sequential):
    def __init__(self, *, num_classes: int, width: int = 8) -> None:
        super().__init__(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, num_classes))


class Distillation(Classification):
    def __init__(self, *, temperature: float = 2.0, share: float = 0.5, **given: Any) -> None:
        super().__init__(**given)
        self.temperature, self.share, self.teacher = temperature, share, lockstep.frozen(pretrained())

    def loss(self, output: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """(1 - share) cross-entropy + share KL (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015)"""
        student_BK, teacher_BK = (
            F.log_softmax(x / self.temperature, 1) for x in (output, self.teacher(batch["input"]))
        )
        kl_B = F.kl_div(student_BK, teacher_BK, reduction="none", log_target=True).sum(1) * self.temperature**2
        cross_entropy_B = super().loss(output, batch)
        self.mean(cross_entropy_B, log=f"{self.stage}/cross_entropy")
        self.mean(kl_B, log=f"{self.stage}/kl")
        return (1 - self.share) * cross_entropy_B + self.share * kl_B
