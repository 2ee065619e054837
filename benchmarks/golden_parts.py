"""Data, networks and modules of the recipes of golden.py, and the callback that records what a run trains on."""

import hashlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Arrays, DataSet
from lockstep.kit.tasks import Regression


class Record(pl.Callback):
    """Appends a digest of the targets of each step so far to order-<rank>.jsonl, and kills the process once at a step."""

    def __init__(self, *, kill_at: int | None = None) -> None:
        self.kill_at, self.step, self.digest = kill_at, -1, hashlib.sha256()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Not in a hook of a batch: logical ranks call it once per step."""
        compute = trainer.strategy.training_step

        def recorded(batch: Any, *args: Any) -> Any:
            self.record(trainer, batch)
            return compute(batch, *args)

        trainer.strategy.training_step = recorded  # type: ignore[method-assign]

    def record(self, trainer: pl.Trainer, batch: Any) -> None:
        if self.step != trainer.global_step:
            self.step, self.digest = trainer.global_step, hashlib.sha256()
        target = batch["target"] if isinstance(batch, Mapping) else batch[1]
        self.digest.update(target.cpu().double().numpy().tobytes())
        path = Path(trainer.default_root_dir) / f"order-{trainer.global_rank}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([self.step, self.digest.hexdigest()[:16]]) + "\n")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        killed = Path(trainer.default_root_dir) / "killed"
        if self.kill_at is not None and trainer.global_step >= self.kill_at and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


# --- a language model ---

LETTERS, LENGTH = 12, 16


class Text(DataSet):
    """Sequences that count on by a step of their own."""

    unit = "sequences"

    def __init__(self) -> None:
        random = np.random.default_rng(3)
        first_N1, step_N1 = random.integers(0, LETTERS, (240, 1)), random.integers(1, 5, (240, 1))
        token_NT = (first_N1 + step_N1 * np.arange(LENGTH + 1)) % LETTERS
        parts = token_NT[:200], token_NT[200:]
        self.train, self.test = (Arrays(input=tokens[:, :-1].copy(), target=tokens[:, 1:].copy()) for tokens in parts)
        self.metadata = {"vocabulary": [*"abcdefghijkl"], "sequence_length": LENGTH}


class Transformer(nn.Module):
    """token_BT to logits_BTV; each token attends to itself and earlier tokens."""

    def __init__(self, *, vocabulary_size: int, sequence_length: int, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, width)
        self.places = nn.Parameter(torch.zeros(sequence_length, width))
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary_size)
        later = nn.Transformer.generate_square_subsequent_mask(sequence_length)
        self.register_buffer("later", later, persistent=False)

    def forward(self, token_BT: Tensor) -> Tensor:
        mask = self.later.to(self.places.dtype)
        return self.head(self.layers(self.tokens(token_BT) + self.places, mask=mask, is_causal=True))


# --- regression with a weight for each sample ---


class Table(DataSet):
    """Each target is unique, so their order is the order of the samples."""

    unit = "rows"

    def __init__(self) -> None:
        self.metadata = {"targets": ["price"]}
        random = np.random.default_rng(4)
        input_NF = random.standard_normal((330, 6)).astype(np.float32)
        target_NT = (input_NF @ random.standard_normal((6, 1)) + 0.1 * random.standard_normal((330, 1))).astype(
            np.float32
        )
        weight_N = random.uniform(0.2, 3, 330).astype(np.float32)
        parts = slice(0, 270), slice(270, None)
        self.train, self.test = (Arrays(input=input_NF[p], target=target_NT[p], weight=weight_N[p]) for p in parts)

    def model_kwargs(self) -> dict[str, int]:
        return {"in_features": 6}


class Mlp(nn.Sequential):
    def __init__(self, *, in_features: int, num_classes: int, width: int = 16) -> None:
        hidden = [nn.Linear(in_features, width), nn.ReLU(), nn.Dropout(0.1)]
        super().__init__(*hidden, nn.Linear(width, num_classes))


class Weighted(Regression):
    def weight(self, batch: Mapping[str, Any]) -> Tensor:
        weight_B: Tensor = batch["weight"]
        return weight_B


# --- a LightningModule with its own dataloaders, batch norm and two optimizers ---


class Pair(pl.LightningModule):
    """Two parts, each with its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 1)

    def error(self, value_BF: Tensor) -> Tensor:
        return (self.head(self.body(value_BF))[:, 0] - value_BF.square().sum(1)).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.error(batch[0])
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        self.log("train/error", loss, batch_size=len(batch[1]))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/error", self.error(batch[0]), batch_size=len(batch[1]))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test/error", self.error(batch[0]), batch_size=len(batch[1]))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(self.body.parameters(), 1e-3), torch.optim.SGD(self.head.parameters(), 1e-2, 0.9)]

    def samples(self, seed: int, count: int) -> TensorDataset:
        draw = torch.Generator().manual_seed(seed)
        value_NF = torch.randn(count, 5, generator=draw)
        return TensorDataset(value_NF, torch.arange(count))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.samples(0, 200), 16, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.samples(1, 40), 16)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.samples(2, 40), 16)
