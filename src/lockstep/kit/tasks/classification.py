"""Classification: one class per sample."""

# B batch · K class

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lockstep import Batch, UserError
from lockstep.kit.panels import Calibration, Confusion, Panel, PrecisionRecall, wilson
from lockstep.kit.task import Targets, Task, loss_factors, validate_outputs

ACCURACY = ("val/acc", "val/loss", None)  # monitors of runs whose headline is the accuracy


class Classification(Task):
    """Takes logits_BK and target_B.

    `class_weights`: a loss factor per class, or `balanced`: the inverse of its fraction of the training samples.
    `loss`: bce is the mean over classes of one-vs-rest binary cross-entropies (timm's BinaryCrossEntropy).
    """

    needs = ("classes",)
    target_spec = Targets("one class number", dims=0, hint="; for one-hot rows, use argmax")
    titles: ClassVar = {"loss": ("Loss", "cross-entropy"), "acc": ("Accuracy", "fraction of samples")}
    activation = "softmax"
    class_weights_K: Tensor | None

    def __init__(
        self,
        *,
        loss: Literal["cross_entropy", "bce"] = "cross_entropy",
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | Literal["balanced"] | None = None,
        **given: Any,
    ) -> None:
        super().__init__(**given)
        if loss == "bce" and class_weights is not None:
            raise UserError("task.class_weights has no effect with task.loss=bce. Remove one of them.")
        self.binary, self.label_smoothing = loss == "bce", label_smoothing
        self.activation = "sigmoid" if self.binary else "softmax"
        weights: Any = class_weights
        if weights == "balanced":
            weights = balanced(self.metadata.get("class_counts"))
        self.register_buffer("class_weights_K", loss_factors(self, "class_weights", weights), persistent=False)

    def validated_target(self, output: Tensor, batch: Batch) -> Tensor:
        """target_B. Raises UserError if the outputs are not logits_BK for the classes of the data."""
        target_B = batch["target"].long()
        validate_outputs(output, len(target_B), len(self.value_names))
        return target_B

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        target_B = self.validated_target(output, batch)
        if self.binary:
            one_hot_BK = F.one_hot(target_B, output.shape[1]).to(output.dtype)
            target_BK = one_hot_BK * (1 - self.label_smoothing) + self.label_smoothing / output.shape[1]
            return F.binary_cross_entropy_with_logits(output, target_BK, reduction="none").mean(1)
        return F.cross_entropy(
            output, target_B, self.class_weights_K, reduction="none", label_smoothing=self.label_smoothing
        )

    def metrics(self) -> dict[str, Metric]:
        return {"acc": MulticlassAccuracy(len(self.value_names), average="micro", validate_args=False)}

    def probabilities(self, output_BK: Tensor) -> Tensor:
        """The probability of each class. With bce, probabilities are independent: each class against the rest."""
        output_BK = output_BK.float()
        return output_BK.sigmoid() if self.binary else output_BK.softmax(1)

    def predictions(self, output: Tensor) -> dict[str, Sequence[Any] | Tensor]:
        probability_BK = self.probabilities(output)
        names = [self.value_names[index] for index in probability_BK.argmax(1).tolist()]
        return {"class": names, "probability": probability_BK.amax(1), "probabilities": probability_BK}

    def targets(self, batch: Mapping[str, Any]) -> dict[str, Sequence[Any] | Tensor]:
        return {"target": [self.value_names[index] for index in batch["target"].tolist()]}

    def top(self, output: Tensor, count: int) -> dict[str, Sequence[Any] | Tensor]:
        ranked = self.probabilities(output).topk(min(count, output.shape[1]), 1)
        columns: dict[str, Sequence[Any] | Tensor] = {}
        for position, (probability_B, index_B) in enumerate(zip(ranked.values.T, ranked.indices.T, strict=True), 1):
            suffix = f"_{position}" if position > 1 else ""
            columns[f"class{suffix}"] = [self.value_names[index] for index in index_B.tolist()]
            columns[f"probability{suffix}"] = probability_B
        return columns

    def primary_metric(self, report: Mapping[str, Any]) -> tuple[str, str] | None:
        text = "test/acc" in report and f"{report['test/acc']:.2%} of {report['test/count']:,} {report['unit']}"
        return ("test accuracy", text) if text and report.get("monitor") in ACCURACY else None

    def interval(self, report: Mapping[str, Any]) -> tuple[float, float] | None:
        count = report.get("test/count", 0)
        return wilson(round(report["test/acc"] * count), count) if self.primary_metric(report) else None

    def test_panels(self) -> dict[str, Panel]:
        return {
            "confusion": Confusion(self.value_names, self.metric_inputs),
            "precision_recall": PrecisionRecall(self.value_names, self.scores),
            "calibration": Calibration(self.scores),
        }

    def scores(self, output: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        return self.probabilities(output), batch["target"]

    def describe(self, output: Tensor, batch: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        names, probability_BK = self.value_names, self.probabilities(output)
        probability_B, guess_B = probability_BK.max(1)
        right_B = probability_BK.gather(1, batch["target"].long()[:, None])[:, 0]
        rows = (x.tolist() for x in (batch["target"], guess_B, probability_B, right_B))
        return [
            {"target": names[t], "prediction": names[g], f"P({names[g]})": p, f"P({names[t]})": r}
            for t, g, p, r in zip(*rows, strict=True)
        ]


def balanced(counts: Sequence[int] | None) -> list[float]:
    """samples / (classes * samples of the class), as in scikit-learn.

    Raises UserError if the counts are unknown or a class has no samples.
    """
    if counts is None or not all(counts):
        raise UserError(
            "task.class_weights=balanced needs the classes of the training samples, stored as one array, and a sample of each class. Set numbers instead."
        )
    return [sum(counts) / (len(counts) * count) for count in counts]
