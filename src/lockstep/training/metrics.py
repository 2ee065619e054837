"""Evaluation figures from sums over samples, never from means of means, so they do not depend on the world size."""

# B batch

import torch
from torch import Tensor
from torchmetrics import Metric


def on_grid(x: Tensor, dtype: torch.dtype, bits: int) -> Tensor:
    """Rounded to multiples of 2^-bits. Their sums in float64 are exact below 2^(53 - bits), so no order of additions changes one."""
    return (x.to(dtype) * 2**bits).round() / 2**bits if dtype == torch.float64 else x.to(dtype)


class MeanLoss(Metric):
    """The weighted mean of per-sample losses, and the number of samples. Losses count in multiples of 2^-24."""

    full_state_update = False
    loss_sum: Tensor
    weight_sum: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        # float64, because the order of 10,000 float32 additions changes the sixth digit. MPS has no float64.
        self.exact = torch.float32 if torch.backends.mps.is_available() else torch.float64
        self.add_state("loss_sum", torch.zeros((), dtype=self.exact), dist_reduce_fx="sum")
        self.add_state("weight_sum", torch.zeros((), dtype=self.exact), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss_B: Tensor, weight_B: Tensor | None) -> None:
        weighted_B = loss_B if weight_B is None else loss_B * weight_B
        dtype = self.loss_sum.dtype
        self.loss_sum += on_grid(weighted_B, dtype, 24).sum()
        self.weight_sum += len(loss_B) if weight_B is None else on_grid(weight_B, dtype, 24).sum()
        self.count += len(loss_B)

    def compute(self) -> dict[str, Tensor]:
        return {"loss": (self.loss_sum / self.weight_sum).float(), "count": self.count.to(self.exact)}
