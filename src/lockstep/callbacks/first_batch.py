"""Keeps the first training batch as the network saw it, for the report."""

from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lockstep.reporting.pictures import restored
from lockstep.tasks.panel import Content, Gallery, Sample
from lockstep.training.panels import pictures

SHOWN = 16  # images


class FirstBatch(pl.Callback):
    """After augmentation; the normalisation is undone. Nothing for data without images."""

    def __init__(self) -> None:
        self.samples: list[Sample] | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.samples is None:
            self.samples = self.taken(batch, getattr(trainer.datamodule, "about", {})) if trainer.is_global_zero else []  # type: ignore[attr-defined]

    def taken(self, batch: Any, about: dict[str, Any]) -> list[Sample]:
        named = isinstance(batch, dict)
        if not (named or isinstance(batch, list | tuple)) or not len(batch):
            return []
        given, targets = (batch.get("input"), batch.get("target")) if named else (batch[0], batch[1:][0:1] or None)
        targets = targets[0] if isinstance(targets, list | tuple) else targets
        if not isinstance(given, Tensor) or given.dim() != 4:
            return []
        given = given[:SHOWN].detach().float().cpu()  # SYNC: once a run
        image_BCHW = restored(given, about)
        index_B = batch["index"][:SHOWN].tolist() if named and "index" in batch else [None] * SHOWN
        facts = [{"target": name} for name in names(targets, about.get("classes") or ())] or [{}] * SHOWN
        rows = zip(index_B, facts, pictures(given if image_BCHW is None else image_BCHW) or (), strict=False)
        return [Sample(index, fact, image) for index, fact, image in rows]

    def report_panels(self) -> list[Content]:
        note = "The first training batch, after augmentation" + (", of the first process." if self.samples else "")
        return [Gallery("What the network saw", self.samples, note)] if self.samples else []


def names(targets: Any, classes: Any) -> list[str]:
    """The classes of the first targets, if each is one class."""
    single = isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point()
    return [str(classes[t]) if 0 <= t < len(classes) else str(t) for t in targets[:SHOWN].tolist()] if single else []
