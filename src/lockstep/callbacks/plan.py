"""One line on what is going to happen, when everything is known and nothing has."""

from typing import TYPE_CHECKING

import lightning.pytorch as pl
from omegaconf import DictConfig

from lockstep.config.identity import title
from lockstep.errors import TrainingFailed
from lockstep.reporting.console import say

if TYPE_CHECKING:
    from lockstep.data.datamodule import DataModule


FILES = "all nodes must see the same files. Check runs_dir and data.root."


class Plan(pl.Callback):
    """Says model, data, strategy, batches, precision and steps before the first step."""

    def __init__(self, cfg: DictConfig, data: "DataModule") -> None:
        self.cfg, self.data = cfg, data

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.agree(trainer, "is the run", self.cfg.run)
        words = "nodes of one job differ in what they compute fast. Type trainer.precision=32-true, or bf16-mixed."
        self.agree(trainer, "computes in precision", self.cfg.trainer.precision, words)
        self.agree(trainer, "starts from", self.cfg.resume or self.cfg.init_from or "new weights")
        self.agree(trainer, "has data with SHA-256", self.data.dataset.fingerprint)

    def agree(self, trainer: pl.Trainer, what: str, own: object, words: str = FILES) -> None:
        """Each process has looked for itself. Raises TrainingFailed where one found something else than rank 0."""
        first = trainer.strategy.broadcast(own)
        if own != first:
            raise TrainingFailed(f"rank {trainer.global_rank} {what} {own}, and rank 0 {first}: {words}")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.agree(trainer, "goes on after step", trainer.global_step)
        cfg, data, world = self.cfg, self.data, trainer.world_size
        parameters = sum(p.numel() for p in pl_module.parameters())
        device = trainer.strategy.root_device.type
        replicas = f"{world} process{'es' if world > 1 else ''} on {device}"
        if cfg.strategy.traits.splits_batches:
            gpus = trainer.num_devices if device == "cuda" else 1
            replicas = (
                f"1 process on {gpus} GPUs"
                if gpus > 1
                else f"ONE device ({device}): there are no two GPUs to split batches over"
            )
        accumulate = trainer.accumulate_grad_batches
        share = cfg.data.batch_size // (world * accumulate)
        say(
            f"{cfg.run}: {title(cfg.model)} ({parameters:,} parameters) · {title(cfg.data)} from {data.dataset.source}"
            f" ({data.train_split.count:,} train, {data.val_split.count:,} val, {data.test_split.count:,} test) · "
            f"{cfg.strategy.name}, {replicas} · batch {cfg.data.batch_size} = {world} x {share}"
            + (f" x {accumulate} accumulated" if accumulate > 1 else "")
            + f" · {trainer.precision} · {trainer.estimated_stepping_batches:g} steps"
            + (f", {trainer.global_step} of them done" if trainer.global_step else "")
        )
