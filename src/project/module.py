"""The LightningModule: loss, metrics and steps. Network, optimizer and schedule come from the config (train.py)."""

# B batch · K class

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lockstep import Batch
from lockstep.kit.tasks import Classification


class Classifier(Classification):
    """One class per sample. The base class provides the rest: predictions by class name, and the report's panels.

    Args:
        label_smoothing: the fraction of each target that is spread over all classes.
        class_weights: a loss factor per class, or `balanced`: the inverse of its fraction of the training samples.
    """

    target_spec = Classification.target_spec  # one class number per sample; checked before training

    def __init__(self, *, label_smoothing: float = 0.0, class_weights: Any = None, **given: Any) -> None:
        """`given`: net, optimizer, scheduler and metadata, as the config says."""
        super().__init__(label_smoothing=label_smoothing, class_weights=class_weights, **given)

    def loss(self, logits_BK: Tensor, batch: Batch) -> Tensor:
        """loss_B: one value per sample, so each sample counts once, regardless of which process computes it."""
        target_B = self.validated_target(logits_BK, batch)
        return F.cross_entropy(
            logits_BK, target_B, self.class_weights_K, reduction="none", label_smoothing=self.label_smoothing
        )

    def metrics(self) -> dict[str, Any]:
        """Logged as val/acc and test/acc."""
        return {"acc": MulticlassAccuracy(len(self.value_names), average="micro", validate_args=False)}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean loss over the global batch, logged as train/loss. A term of your own: `+ self.mean(penalty_B, log="train/penalty")`."""
        return self.mean_loss(self(batch), batch)  # self(batch): the network's output for batch["input"]

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Adds the samples to val/loss and the metrics. Each sample counts once."""
        return self.update_metrics(self(batch), batch, batch_idx, dataloader_idx)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        """The optimizer of configs/optim and its schedule, which advances after each step."""
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"}}
