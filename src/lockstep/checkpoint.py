"""Checkpoints: written whole or not at all, read without running code, the same keys whatever wrote them."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from omegaconf import DictConfig
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.pace import completes_step


class AtomicCheckpointIO(CheckpointIO):
    """One file, which takes its name when it is whole and on the disk: a crash leaves the one before."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        with part.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    def load_checkpoint(
        self, path: str | Path, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Only tensors and plain values are read, whatever the caller says: a checkpoint cannot run code."""
        loaded: dict[str, Any] = torch.load(path, map_location=map_location or "cpu", weights_only=True, mmap=True)
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        if Path(path).is_dir():  # shards
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)


class LastCheckpoint(Checkpoint):
    """last.ckpt: after each epoch, every so many optimizer steps, and where `max_steps` ends a run.

    The last of these may be in mid-epoch. Lightning's ModelCheckpoint saves there once the epoch is closed, and a run
    that is resumed with more steps would leave out the rest of it.
    """

    def __init__(self, path: Path, every_n_steps: int | None) -> None:
        self.path, self.every_n_steps = path, every_n_steps
        self.saved = False

    def save(self, trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(self.path, weights_only=False)
        self.saved = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        wanted = step == trainer.max_steps or (self.every_n_steps and step % self.every_n_steps == 0)
        if wanted and completes_step(trainer, batch_idx):
            self.save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_last_batch:
            self.save(trainer)


def checkpoint_callbacks(cfg: DictConfig, folder: Path) -> list[Checkpoint]:
    """The best by validation, where there is one; and the last."""
    last = LastCheckpoint(folder / "last.ckpt", cfg.checkpoint.every_n_steps)
    if cfg.trainer.limit_val_batches == 0:
        return [last]
    best = ModelCheckpoint(
        dirpath=folder,
        filename="best-step-{step}",
        auto_insert_metric_name=False,
        monitor=cfg.checkpoint.monitor,
        mode=cfg.checkpoint.mode,
        save_top_k=cfg.checkpoint.save_top_k,
        save_on_train_epoch_end=False,  # after each validation: max_steps may end an epoch before its own
    )
    return [best, last]


def best_checkpoint(trainer: pl.Trainer) -> str | None:
    """The checkpoint to test: the best by `checkpoint.monitor`, or the last where nothing was validated."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.best_model_path:
            return callback.best_model_path
        if isinstance(callback, LastCheckpoint) and callback.saved:
            return str(callback.path)
    return None


def read(path: Path) -> dict[str, Any]:
    """A checkpoint's content on the CPU; a folder of shards is put together."""
    if path.is_file():
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return loaded
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    meta: dict[str, Any] = torch.load(path / "meta.pt", map_location="cpu", weights_only=True)
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(path, Path(folder) / "whole.pt")
        return {**meta, **torch.load(Path(folder) / "whole.pt", map_location="cpu", weights_only=True)}


def network_weights(path: Path) -> dict[str, Tensor]:
    """The network's state, with its own keys."""
    state: dict[str, Tensor] = read(path)["state_dict"]
    return {key.removeprefix("net."): value for key, value in state.items() if key.startswith("net.")}


def load_weights(net: nn.Module, path: Path) -> None:
    """Loads a checkpoint's weights into `net`, strictly. Raises UserError that lists what does not fit."""
    weights, own = network_weights(path), net.state_dict()
    missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [
        f"{k} {tuple(weights[k].shape)} instead of {tuple(own[k].shape)}"
        for k in own.keys() & weights.keys()
        if weights[k].shape != own[k].shape
    ]
    if missing or extra or shapes:
        parts = (
            [f"missing: {', '.join(missing[:5])}"] * bool(missing)
            + [f"not wanted: {', '.join(extra[:5])}"] * bool(extra)
            + shapes[:5]
        )
        raise UserError(
            f"{path} does not fit the network: {'; '.join(parts)}. Choose the model and data that it was trained with."
        )
    net.load_state_dict(weights)
