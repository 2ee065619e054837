"""Classification: one class per sample."""

# B batch · K class

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lockstep.errors import UserError
from lockstep.tasks.task import Task, class_weight, refuse_outputs


class Classification(Task):
    """logits_BK and target_B. `class_weights`: a loss factor per class."""

    needs = ("classes",)
    class_weights_K: Tensor | None

    def __init__(self, *, label_smoothing: float = 0.0, class_weights: Sequence[float] | None = None) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.register_buffer("class_weights_K", class_weight(class_weights), persistent=False)

    def bind(self, about: Mapping[str, Any]) -> None:
        super().bind(about)
        if self.class_weights_K is not None and len(self.class_weights_K) != len(about["classes"]):
            raise UserError(
                f"task.class_weights has {len(self.class_weights_K)} numbers; the data has {len(about['classes'])} classes. Give one per class."
            )

    def network_arguments(self) -> dict[str, Any]:
        return {"num_classes": len(self.about["classes"])}

    def loss(self, output: Tensor, batch: Mapping[str, Any]) -> Tensor:
        refuse_outputs(output, len(batch["target"]), max(len(self.about["classes"]), *output.shape[-1:]))
        return F.cross_entropy(
            output, batch["target"], self.class_weights_K, reduction="none", label_smoothing=self.label_smoothing
        )

    def metrics(self) -> dict[str, Metric]:
        return {"acc": MulticlassAccuracy(len(self.about["classes"]), average="micro", validate_args=False)}

    def metric_arguments(self) -> dict[str, Any]:
        return {"num_classes": len(self.about["classes"])}

    def predictions(self, output: Tensor) -> dict[str, Sequence[Any] | Tensor]:
        probability_BK = output.float().softmax(1)
        names = [self.about["classes"][place] for place in probability_BK.argmax(1).tolist()]
        return {"class": names, "probability": probability_BK.amax(1), "probabilities": probability_BK}

    def headline(self, report: Mapping[str, Any]) -> tuple[str, str]:
        if report["monitor"] not in ("val/acc", "val/loss"):
            return super().headline(report)
        return "test accuracy", f"{report['test/acc']:.2%} of {report['test/count']:,} {report['unit']}"

    def panels(self) -> list[tuple[str, str, tuple[str, ...]]]:
        return [
            ("Loss", "cross-entropy", ("train/loss", "val/loss")),
            ("Accuracy", "share of samples", ("val/acc",)),
        ]
