"""Checkpoints: written whole or not at all, read without running code, the same keys whatever wrote them."""

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig
from torch import Tensor, nn

from lockstep.errors import UserError


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


def checkpoint_callbacks(cfg: DictConfig, folder: Path) -> list[ModelCheckpoint]:
    """The best by validation; and last.ckpt, at each epoch's end and every `checkpoint.every_n_steps`."""
    callbacks = []
    if cfg.trainer.limit_val_batches != 0:
        best = ModelCheckpoint(
            dirpath=folder,
            filename="best-step={step}",
            auto_insert_metric_name=False,
            monitor=cfg.checkpoint.monitor,
            mode=cfg.checkpoint.mode,
            save_top_k=cfg.checkpoint.save_top_k,
            save_on_train_epoch_end=False,  # after each validation: max_steps may end an epoch before its own
        )
        callbacks.append(best)
    last = partial(ModelCheckpoint, dirpath=folder, filename="last", save_top_k=1, enable_version_counter=False)
    callbacks.append(last(every_n_epochs=1, save_on_train_epoch_end=True))
    if cfg.checkpoint.every_n_steps:
        callbacks.append(last(every_n_train_steps=cfg.checkpoint.every_n_steps))
    return callbacks


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
