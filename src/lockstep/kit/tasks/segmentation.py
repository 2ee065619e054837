"""Segmentation: a class per pixel."""

# B batch · K class · H W pixel

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from lockstep.kit.panels import ByPixel, Mask, Panel
from lockstep.kit.task import Targets, Task, validate_outputs


class Segmentation(Task):
    """Takes logits_BKHW and target_BHW. Pixels have equal weight in any image; `ignore_index` marks ignored pixels.

    `dice`: the weight of a soft Dice loss, computed per image and added to the cross-entropy (Milletari et al.,
    "V-Net", 2016).
    """

    needs = ("classes",)
    titles: ClassVar = {
        "loss": ("Loss", "cross-entropy"),
        "iou": ("Intersection over union", "mean over classes"),
        "acc": ("Accuracy", "fraction of pixels"),
    }
    target_spec = Targets("a class number for each pixel", dims=2, ignored=255)
    activation = "softmax"

    def __init__(self, *, ignore_index: int = 255, dice: float = 0.0, **given: Any) -> None:
        super().__init__(**given)
        self.ignore_index, self.dice = ignore_index, dice
        self.target_spec = self.target_spec and replace(self.target_spec, ignored=ignore_index)

    def loss(self, output: Tensor, batch: Mapping[str, Any]) -> Tensor:
        target_BHW = batch["target"].long()
        validate_outputs(output, len(target_BHW), len(self.value_names), *target_BHW.shape[1:])
        loss_BHW = F.cross_entropy(output, target_BHW, reduction="none", ignore_index=self.ignore_index)
        loss_B = loss_BHW.sum((1, 2)) / (target_BHW != self.ignore_index).sum((1, 2)).clamp(min=1)
        return loss_B + self.dice * dice_loss(output, target_BHW, self.ignore_index) if self.dice else loss_B

    def weight(self, batch: Mapping[str, Any]) -> Tensor:
        """The number of pixels that count, as a fraction of an image.

        The fraction keeps sums of gradients within the range of half precision.
        """
        side = self.metadata.get("image_size")
        return (batch["target"] != self.ignore_index).sum((1, 2)) / (side**2 if isinstance(side, int) else 1)

    def metrics(self) -> dict[str, Metric]:
        kwargs = self.metric_arguments() | {"validate_args": False}
        return {
            "iou": MulticlassJaccardIndex(average="macro", **kwargs),
            "acc": MulticlassAccuracy(average="micro", **kwargs),
        }

    def metric_arguments(self) -> dict[str, Any]:
        return super().metric_arguments() | {"ignore_index": self.ignore_index}

    def metric_inputs(self, output: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        return output, batch["target"].long()

    def predictions(self, output: Tensor) -> dict[str, Sequence[Any] | Tensor]:
        return {"mask": output.argmax(1)}

    def test_panels(self) -> dict[str, Panel]:
        return {"pixels": ByPixel(self.value_names, self.metric_inputs, self.ignore_index)}

    def describe(self, output: Tensor, batch: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """The mask of the prediction is empty where the target is ignored."""
        target_BHW, guess_BHW = batch["target"], output.argmax(1)
        shown_BHW = guess_BHW.where(target_BHW != self.ignore_index, self.ignore_index)
        return [
            {name: Mask(x, self.ignore_index, self.value_names) for name, x in (("target", t), ("prediction", g))}
            for t, g in zip(target_BHW.cpu().numpy(), shown_BHW.cpu().numpy(), strict=True)
        ]


def dice_loss(logits_BKHW: Tensor, target_BHW: Tensor, ignore_index: int) -> Tensor:
    """loss_B: 1 - the mean over classes of (2 |p t| + 1) / (|p| + |t| + 1). An absent class thus scores 1."""
    counts_B1HW = (target_BHW != ignore_index)[:, None]
    probability_BKHW = logits_BKHW.softmax(1) * counts_B1HW
    index_B1HW = target_BHW[:, None].where(counts_B1HW, 0)
    target_BKHW = torch.zeros_like(probability_BKHW).scatter_(1, index_B1HW, 1.0) * counts_B1HW
    intersection_BK = (probability_BKHW * target_BKHW).sum((2, 3))
    sum_BK = probability_BKHW.sum((2, 3)) + target_BKHW.sum((2, 3))
    return 1 - ((2 * intersection_BK + 1) / (sum_BK + 1)).mean(1)
