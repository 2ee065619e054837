"""The best checkpoints by the monitored metric."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks

from lockstep.checkpoints.finding import BEST
from lockstep.training.steps import steps_done


class BestCheckpoint(callbacks.ModelCheckpoint):
    """Lightning's keeps the first of equal scores. Here the lower val/loss decides, then the later step.

    Names have the steps done: `trainer.global_step` counts those of every optimizer. A run resumed from an earlier checkpoint writes
    the same file again.
    """

    def __init__(self, **options: Any) -> None:
        # after each validation: max_steps may end an epoch before its own
        super().__init__(**options, save_on_train_epoch_end=False)
        self.losses: dict[str, float] = {}  # by file name, since a run's folder may be moved
        self.saved_at = 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.losses = dict(state_dict.get("losses", {}))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Saves the checkpoint if it is among the best `save_top_k`, and removes those that no longer are."""
        step = steps_done(trainer)
        if trainer.state.fn != "fit" or trainer.sanity_checking or not self.save_top_k or step in (0, self.saved_at):
            return
        assert self.monitor
        score, loss = (float(trainer.callback_metrics.get(name, math.nan)) for name in (self.monitor, "val/loss"))
        sign = 1 if self.mode == "max" else -1
        new = str(Path(str(self.dirpath)) / f"best-step-{step}.ckpt")
        scores = self.best_k_models | {new: torch.tensor(-sign * math.inf if math.isnan(score) else score)}
        losses = self.losses | {Path(new).name: math.inf if math.isnan(loss) else loss}

        def rank(path: str) -> tuple[float, float, int]:
            name = Path(path).name
            found = BEST.fullmatch(name)
            return sign * float(scores[path]), -losses.get(name, math.inf), int(found[1]) if found else 0

        ranked = sorted(scores, key=rank, reverse=True)
        kept = ranked if self.save_top_k == -1 else ranked[: self.save_top_k]
        if not trainer.strategy.reduce_boolean_decision(new in kept):  # processes may have different scores
            return
        self.best_k_models, self.current_score = {path: scores[path] for path in kept}, scores[new]
        self.losses = {name: losses[name] for name in (Path(path).name for path in kept) if name in losses}
        self.best_model_path, self.kth_best_model_path = kept[0], kept[-1]
        self.best_model_score, self.kth_value = scores[kept[0]], scores[kept[-1]]
        trainer.save_checkpoint(new, weights_only=False)
        self.saved_at = step
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.after_save_checkpoint(self)
        for path in ranked[len(kept) :]:
            trainer.strategy.remove_checkpoint(path)
