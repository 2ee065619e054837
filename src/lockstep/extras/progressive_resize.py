"""Trains on smaller images at first, which is faster."""

import math
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn import functional as F

from lockstep.data.dataset import Batch
from lockstep.errors import UserError
from lockstep.kit.augment.operation import Checked, Count, Fraction, Probability
from lockstep.kit.images import spatial
from lockstep.kit.pixels import resize_nearest
from lockstep.training.arithmetic import steps_done, total_steps


@dataclass(eq=False)
class ProgressiveResize(Checked, Callback):
    """Scales the side of training images by `initial_scale` at first, and then up to full size.

    They grow after `delay_fraction` of the run and have full size for its last `finetune_fraction`. Evaluation always uses full size.
    The schedule and its defaults are those of MosaicML's Composer; the idea is fast.ai's (Howard, 2018). A size is a multiple of
    `size_increment` pixels. It depends on the step only, so it is the same on all processes and after a resume.
    """

    initial_scale: Fraction = 0.5
    delay_fraction: Probability = 0.5
    finetune_fraction: Probability = 0.2
    size_increment: Count = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay_fraction + self.finetune_fraction > 1:
            raise ValueError("delay_fraction + finetune_fraction is above 1. Set smaller values")

    def side(self, whole: int, progress: float) -> int:
        """The side of images whose full side is `whole` pixels, at `progress` (0 to 1) of the run."""
        ramp = 1 - self.delay_fraction - self.finetune_fraction
        growth = (progress - self.delay_fraction) / ramp if ramp > 0 else float(progress >= self.delay_fraction)
        scale = self.initial_scale + (1 - self.initial_scale) * min(1.0, max(0.0, growth))
        if scale == 1:
            return whole
        return min(whole, max(self.size_increment, int(scale * whole) // self.size_increment * self.size_increment))

    def resized(self, batch: Batch, progress: float) -> Batch:
        """A batch after `preprocess`, with resized images and masks."""
        if not isinstance(batch, dict):
            raise UserError("callbacks.progressive_resize needs batches that are dicts: task.named_batches=true.")
        image_BCHW, values = batch["input"], spatial(batch)
        if image_BCHW.dim() != 4 or not all(hasattr(value, "ndim") for value in values.values()):
            raise UserError("callbacks.progressive_resize resizes only images and masks. Remove it.")
        whole = image_BCHW.shape[-1]
        if (side := self.side(whole, progress)) == whole:
            return batch
        masks = {name: resize_nearest(v, (side, side)) for name, v in values.items() if v.shape[-1] == whole}
        small_BCHW = F.interpolate(image_BCHW, size=(side, side), mode="bilinear", antialias=True)
        return {**batch, **masks, "input": small_BCHW}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if math.isinf(steps := total_steps(trainer)):
            limits = "trainer.max_epochs=<n> or trainer.max_steps=<n>"
            raise UserError(f"callbacks.progressive_resize needs the run's number of steps. Set {limits}.")
        batch.update(self.resized(batch, steps_done(trainer) / steps))
