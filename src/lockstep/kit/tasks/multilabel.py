"""Multilabel classification: any number of labels per sample."""

# B batch · L label

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MultilabelAccuracy, MultilabelStatScores

from lockstep import UserError
from lockstep.kit.panels import ByLabel, Panel, PrecisionRecall
from lockstep.kit.task import Targets, Task, loss_factors, validate_outputs


class Multilabel(Task):
    """Takes logits_BL and target_BL of 0 and 1. `pos_weight`: a loss factor per label for samples that have it."""

    needs = ("labels",)
    names = "labels"
    target_spec = Targets("0 or 1 for each label", dims=1, integer=False, maximum=1)
    titles: ClassVar = {
        "loss": ("Loss", "binary cross-entropy"),
        "f1": ("F1", "mean over labels that occur or are predicted"),
        "acc": ("Accuracy", "fraction of labels"),
    }
    activation = "sigmoid"
    pos_weight_L: Tensor | None

    def __init__(self, *, threshold: float = 0.5, pos_weight: Sequence[float] | None = None, **given: Any) -> None:
        super().__init__(**given)
        if not 0 < threshold < 1:
            raise UserError(f"task.threshold={threshold} is invalid; expected a probability between 0 and 1.")
        self.threshold = threshold
        self.register_buffer("pos_weight_L", loss_factors(self, "pos_weight", pos_weight), persistent=False)

    def loss(self, output: Tensor, batch: Mapping[str, Any]) -> Tensor:
        target_BL = batch["target"].to(output.dtype)
        validate_outputs(output, *target_BL.shape)
        loss_BL = F.binary_cross_entropy_with_logits(output, target_BL, reduction="none", pos_weight=self.pos_weight_L)
        return loss_BL.mean(1)

    def metrics(self) -> dict[str, Metric]:
        kwargs = self.metric_arguments() | {"validate_args": False}
        return {"f1": MacroF1(average=None, **kwargs), "acc": MultilabelAccuracy(average="micro", **kwargs)}

    def metric_arguments(self) -> dict[str, Any]:
        return {"num_labels": len(self.value_names), "threshold": self.threshold}

    def metric_inputs(self, output: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        # Passes probabilities, because torchmetrics would mistake logits in [0, 1] for probabilities.
        return output.sigmoid(), batch["target"].long()

    def predictions(self, output: Tensor) -> dict[str, Sequence[Any] | Tensor]:
        probability_BL = output.float().sigmoid()
        return {"labels": self.present(probability_BL > self.threshold), "probabilities": probability_BL}

    def targets(self, batch: Mapping[str, Any]) -> dict[str, Sequence[Any] | Tensor]:
        return {"target": self.present(batch["target"] > 0)}

    def present(self, present_BL: Tensor) -> list[list[str]]:
        names = self.value_names
        return [[name for name, flag in zip(names, row, strict=True) if flag] for row in present_BL.tolist()]

    def test_panels(self) -> dict[str, Panel]:
        return {
            "labels": ByLabel(self.value_names, self.metric_inputs, self.threshold),
            "precision_recall": PrecisionRecall(self.value_names, self.metric_inputs),
        }

    def describe(self, output: Tensor, batch: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        masks = {"target": batch["target"].bool(), "prediction": output.sigmoid() > self.threshold}
        rows = zip(*(self.present(present_BL) for present_BL in masks.values()), strict=True)
        return [{name: list(labels) or ["none"] for name, labels in zip(masks, row, strict=True)} for row in rows]


class MacroF1(MultilabelStatScores):
    """The mean over the labels that occur or are predicted; 1 if there are none.

    torchmetrics (1.9) counts an absent label as 0.
    """

    plot_upper_bound = 1.0

    def compute(self) -> Tensor:
        tp_L, fp_L, _, fn_L, _ = super().compute().unbind(-1)
        f1_L = 2 * tp_L / (2 * tp_L + fp_L + fn_L)
        return f1_L.nanmean().nan_to_num(1.0)
