"""Multilabel classification: any number of labels per sample."""

# B batch · L label

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MultilabelAccuracy, MultilabelF1Score

from lockstep.errors import UserError
from lockstep.tasks.panel import Panel
from lockstep.tasks.panels import ByLabel
from lockstep.tasks.task import Task, class_weight, refuse_count, refuse_outputs


class Multilabel(Task):
    """logits_BL and target_BL of 0 and 1. `pos_weight`: a loss factor per label, applied where it is present."""

    needs = ("labels",)
    names = "labels"
    activation = "sigmoid"
    pos_weight_L: Tensor | None

    def __init__(self, *, threshold: float = 0.5, pos_weight: Sequence[float] | None = None) -> None:
        super().__init__()
        if not 0 < threshold < 1:
            raise UserError(
                f"task.threshold={threshold} is not possible; it takes a probability between 0 and 1. Type task.threshold=0.5."
            )
        self.threshold = threshold
        self.register_buffer("pos_weight_L", class_weight(pos_weight), persistent=False)

    def bind(self, about: Mapping[str, Any]) -> None:
        super().bind(about)
        refuse_count("pos_weight", self.pos_weight_L, about, "labels")

    def network_arguments(self) -> dict[str, Any]:
        return {"num_classes": len(self.about["labels"])}

    def loss(self, output: Tensor, batch: Mapping[str, Any]) -> Tensor:
        target_BL = batch["target"].to(output.dtype)
        refuse_outputs(output, *target_BL.shape)
        loss_BL = F.binary_cross_entropy_with_logits(output, target_BL, reduction="none", pos_weight=self.pos_weight_L)
        return loss_BL.mean(1)

    def metrics(self) -> dict[str, Metric]:
        arguments: dict[str, Any] = {**self.metric_arguments(), "validate_args": False}
        return {
            "f1": MultilabelF1Score(average="macro", **arguments),
            "acc": MultilabelAccuracy(average="micro", **arguments),
        }

    def metric_arguments(self) -> dict[str, Any]:
        return {"num_labels": len(self.about["labels"]), "threshold": self.threshold}

    def metric_inputs(self, output: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        # Probabilities, because torchmetrics would mistake logits in [0, 1] for probabilities.
        return output.sigmoid(), batch["target"].long()

    def predictions(self, output: Tensor) -> dict[str, Sequence[Any] | Tensor]:
        probability_BL = output.float().sigmoid()
        return {"labels": self.present(probability_BL > self.threshold), "probabilities": probability_BL}

    def targets(self, batch: Mapping[str, Any]) -> dict[str, Sequence[Any] | Tensor]:
        return {"target": self.present(batch["target"] > 0)}

    def present(self, there_BL: Tensor) -> list[list[str]]:
        names = self.about["labels"]
        return [[name for name, there in zip(names, row, strict=True) if there] for row in there_BL.tolist()]

    def panels(self) -> list[tuple[str, str, tuple[str, ...]]]:
        return [
            ("Loss", "binary cross-entropy", ("train/loss", "val/loss")),
            ("F1", "mean over labels", ("val/f1",)),
            ("Accuracy", "share of labels", ("val/acc",)),
        ]

    def test_panels(self) -> dict[str, Panel]:
        return {"labels": ByLabel(self.about["labels"], self.metric_inputs, self.threshold)}

    def describe(self, output: Tensor, batch: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        found = {"target": batch["target"].bool(), "prediction": output.sigmoid() > self.threshold}
        rows = zip(*(self.present(there_BL) for there_BL in found.values()), strict=True)
        return [{name: ", ".join(labels) or "none" for name, labels in zip(found, row, strict=True)} for row in rows]
