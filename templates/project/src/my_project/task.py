"""The task: the loss of each sample, and the figures. It knows nothing about ranks, devices or checkpoints."""

from collections.abc import Mapping
from typing import Any

from lockstep.tasks import Classification
from torch import Tensor


class Goal(Classification):
    """One class per sample. `metrics`, `weight` and others can be overridden as well."""

    def loss(self, output: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """loss_B: one number per sample; Lockstep takes the mean over the global batch."""
        return super().loss(output, batch)
