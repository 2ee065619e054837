"""Evaluation figures from sums over samples, never from means of means: the world size cannot show in them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric


class Evaluation(Metric):
    """Mean cross-entropy, accuracy, and the number of samples they are about. Labels of -100 count nowhere."""

    full_state_update = False
    loss_sum: Tensor
    correct: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        # float64: the order of 10,000 additions in float32 would show in the sixth digit. MPS has no float64.
        self.exact = torch.float32 if torch.backends.mps.is_available() else torch.float64
        self.add_state("loss_sum", torch.zeros((), dtype=self.exact), dist_reduce_fx="sum")
        self.add_state("correct", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        """Moves with the task, but stays exact where `trainer.precision=bf16-true` and its like convert the task."""
        this = super()._apply(fn, exclude_state)
        self.loss_sum = self.loss_sum.to(self.exact)
        self._defaults["loss_sum"] = torch.zeros_like(self.loss_sum)
        return this

    def update(self, logits_BK: Tensor, label_B: Tensor) -> None:
        loss_B = F.cross_entropy(logits_BK.float(), label_B, reduction="none")  # 0 where the label is -100
        self.loss_sum += loss_B.sum(dtype=self.loss_sum.dtype)
        self.correct += (logits_BK.argmax(1) == label_B).sum()
        self.count += (label_B >= 0).sum()

    def compute(self) -> dict[str, Tensor]:
        return {
            "loss": (self.loss_sum / self.count).float(),
            "acc": (self.correct / self.count).float(),
            "count": self.count.to(self.exact),
        }
