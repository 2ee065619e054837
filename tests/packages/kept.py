"""What modules, callbacks and data of a user's keep or draw outside of a step, for tests/training/test_kept.py."""

from collections import OrderedDict, defaultdict, deque
from datetime import datetime
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import SumMetric
from unseen import draw


def samples(seed: int, count: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


class Plain(pl.LightningModule):
    """Six steps an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.body(x).relu())

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)

    def train_dataloader(self):
        return DataLoader(samples(0), 8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(samples(0, 16), 8)

    test_dataloader = val_dataloader  # the same samples, so that both losses are equal


class StepCheckpoint(ModelCheckpoint):
    pass


def of_lightning() -> list[pl.Callback]:
    """What projects have. The first has the monitor and the mode of the run."""
    return [
        ModelCheckpoint(monitor="val_loss", save_last=True, filename="{epoch}-{step}"),
        StepCheckpoint(every_n_train_steps=4, save_top_k=-1, filename="at-{step}"),
        EarlyStopping("val_loss", patience=0, min_delta=1000),
        RichProgressBar(),
        TQDMProgressBar(),
        ModelSummary(),
        LearningRateMonitor(),
    ]


class Adopted(Plain):
    def configure_callbacks(self):
        return of_lightning()


class Averaged(Plain):
    def configure_callbacks(self):
        return StochasticWeightAveraging(0.1)


class Permuted(Plain):
    """Draws a constant that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.order = torch.randperm(6)

    def forward(self, x):
        return super().forward(x[:, self.order] * torch.arange(1.0, 7.0))


class Noisy(Plain):
    """Draws where Lightning has transforms on the device."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + torch.from_numpy(np.random.normal(size=(len(batch[0]), 6))).float(), batch[1]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + torch.randn_like(batch[0]), batch[1]


class Mix(pl.Callback):
    """Draws and counts when a batch begins."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.count += 1
        batch[0].add_(torch.randn_like(batch[0]))

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


class Thawed(Plain):
    """Its body is trained from the second epoch on."""

    backbone = property(lambda self: self.body)

    def configure_callbacks(self):
        return BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), 0.05, momentum=0.5)


class Taught(Plain):
    """Hooks of a batch, of the module and of a callback, move what the next forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 1).requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))

    def loss(self, batch):
        return super().loss(batch) + self.scale * F.mse_loss(self(batch[0]), self.teacher(batch[0]))

    def move(self, share):
        for teacher, student in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            teacher.data.lerp_(student.data, share)

    def on_train_batch_start(self, batch, batch_idx):
        self.scale.mul_(0.9 + 0.1 * torch.rand(()))

    def on_before_zero_grad(self, optimizer):
        self.move(0.1 * torch.rand(()))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.move(0.2)

    def configure_callbacks(self):
        return Moves()


class Moves(pl.Callback):
    def on_after_backward(self, trainer, pl_module):
        pl_module.move(0.3)


class Stateful(Plain):
    """Keeps what a state_dict has besides weights."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.extra = SumMetric(), {"steps": 0, "sum": torch.zeros(())}
        self.seen.persistent(True)

    def training_step(self, batch, batch_idx):
        self.seen.update(len(batch[0]))
        self.extra = {"steps": self.extra["steps"] + 1, "sum": self.extra["sum"] + 1}
        return self.loss(batch)

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state

    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)
        self.log("test_steps", float(self.extra["steps"]))
        self.log("test_sum", self.extra["sum"])
        self.log("test_seen", self.seen.sum_value)


class Partial(Plain):
    """Has a part that it does not save."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        nn.init.eye_(self.frozen.weight)
        nn.init.zeros_(self.frozen.bias)

    def forward(self, x):
        return super().forward(self.frozen(x))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if not k.startswith("frozen.")}


class Unfreezing(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.body.requires_grad_(True)


class Grown(Unfreezing):
    """And its optimizer gets them then."""

    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.optimizers().optimizer.add_param_group({"params": self.body.parameters(), "lr": 0.02})

    configure_optimizers = Thawed.configure_optimizers


class Accumulating(Plain):
    """As Lightning's documentation accumulates in manual optimization, over four batches."""

    of_lightning = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch) / 4)
        if self.trainer.fit_loop.epoch_loop.batch_progress.total.ready % 4 == 0:
            optimizer = self.optimizers(use_pl_optimizer=self.of_lightning)
            optimizer.step()
            optimizer.zero_grad()


class AccumulatingAlone(Accumulating):
    """Calls torch's optimizer itself, so Lightning does not see the step."""

    of_lightning = False


class Foreign(Plain):
    """Optimizes a tensor that is none of its parameters, as implementations of SAC do."""

    def configure_optimizers(self):
        self.alpha = torch.zeros(1, requires_grad=True)
        return torch.optim.SGD([*self.parameters(), self.alpha], 0.05)


class LateHead(Plain):
    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.body = nn.Linear(6, 6)

    def configure_model(self):
        self.head = nn.Linear(6, 1)


class Keys(Dataset):
    """Samples with names that Lockstep's own batches have too."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return {"input": torch.full((3, 4, 4), float(i)), "index": f"img_{i}.png", "count": torch.tensor(float(i))}


class Named(Plain):
    def loss(self, batch):
        return F.mse_loss(self(batch["input"][:, :, 0, :2].flatten(1)).flatten(), batch["count"])

    def train_dataloader(self):
        return DataLoader(Keys(), 8)

    val_dataloader = test_dataloader = train_dataloader


class Late(Dataset):
    """Creates its generator where it reads."""

    rng = None

    def __len__(self):
        return 24

    def __getitem__(self, i):
        if self.rng is None:
            self.rng = np.random.default_rng()
        x = torch.full((6,), float(i)) + self.rng.normal()
        return x, x.sum(0, keepdim=True)


class Unseen(Late):
    """Its generator is in another module, which no object leads to."""

    def __getitem__(self, i):
        x = torch.full((6,), float(i)) + draw()
        return x, x.sum(0, keepdim=True)


class OfLate(Plain):
    def train_dataloader(self):
        return DataLoader(Late(), 8, num_workers=1)


class OfUnseen(Plain):
    def train_dataloader(self):
        return DataLoader(Unseen(), 8)


class Running(nn.Module):
    """Has a statistic of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.layer(x - self.mean)


class Statistics(Plain):
    """A body with buffers of every kind, most of them next to no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm1d(6),
            nn.BatchNorm1d(6, affine=False),
            nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
            Running(),
            nn.Unflatten(1, (3, 2)),
            nn.InstanceNorm1d(3, track_running_stats=True),
            nn.Flatten(),
            nn.Dropout(0.1),
        )


ODD = {
    "scalar": np.float64(0.1), "integer": np.int64(3), "truth": np.bool_(True), "array": np.arange(6.0).reshape(2, 3)[:, ::-1],
    "names": np.array(["a", "bc"]), "path": Path("a/b"), "set": {1, "b"}, "frozen": frozenset([(1, 2)]), "complex": 1 - 2j,
    "recent": deque([1.0, 2.0], maxlen=2), "counts": defaultdict(int, a=1), "lists": defaultdict(list, {3: [Path("c")]}),
    "when": datetime(2026, 1, 2, 3, 4, 5), "pair": (np.float32(0.5), {"x": {np.int8(1)}}), "ordered": OrderedDict(b=1, a=2),
}  # fmt: skip


class Odd(pl.Callback):
    """Its state has values of many types."""

    loaded = None

    def state_dict(self):
        return {**ODD, np.int64(7): "key"}

    def load_state_dict(self, state_dict):
        Odd.loaded = state_dict


class Writing(Plain):
    """Writes objects into its checkpoints, as libraries do."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["special"] = {"loss": F.mse_loss, "kept": np.float64(2.0), "list": [object()], frozenset([1]): 1}

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["special"] == {"kept": 2.0}
        assert type(checkpoint["special"]["kept"]) is np.float64


class Hiding(Plain):
    """A hook of its state_dict drops trained weights."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.hide)

    @staticmethod
    def hide(module, state, prefix, metadata):
        del state[prefix + "head.weight"]


class Prefixed(Plain):
    """Its state_dict has names of its own."""

    def state_dict(self, *args, **kwargs):
        return {f"net.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict, *args, **kwargs):
        return super().load_state_dict({n.removeprefix("net."): v for n, v in state_dict.items()}, *args, **kwargs)


class Ending(Plain):
    """An iterator of its own ends within a step."""

    def training_step(self, batch, batch_idx):
        next(iter([]))


class Dropping(Plain):
    """Drops trained weights from its checkpoints."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if not k.startswith("head.")}


class Moving(Plain):
    """Saves its trained weights elsewhere in its checkpoints."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {f"my {k}": checkpoint["state_dict"].pop(k) for k in [*checkpoint["state_dict"]]}

    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {k.removeprefix("my "): v for k, v in checkpoint["mine"].items()}


class Teaching(Partial):
    """Its part without gradients changes, and is not saved."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.frozen.weight.data.lerp_(self.body.weight.data, 0.5)


class Emptying(Plain):
    """Removes what its optimizer keeps, to save space."""

    def on_save_checkpoint(self, checkpoint):
        for saved in checkpoint["optimizer_states"]:
            saved["state"] = {}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class NotANumber(Plain):
    """Its validations in `bad` are NaN."""

    bad, validations = range(10), 0

    def validation_step(self, batch, batch_idx):
        value = float("nan") if self.validations in self.bad else 1.0 / (self.validations + 1)
        self.log("val_loss", value, sync_dist=True, batch_size=8)

    def on_validation_epoch_end(self):
        self.validations += not self.trainer.sanity_checking


class WithoutLoss(Plain):
    """Its validations have a score, but no loss."""

    def validation_step(self, batch, batch_idx):
        self.log_dict({"val/acc": 0.5, "val/loss": float("nan")}, sync_dist=True, batch_size=8)


class OnceNotANumber(NotANumber):
    bad = (0, 2)


class Skipping(Plain):
    """Never returns a loss."""

    def training_step(self, batch, batch_idx):
        return None


class OfLibrary(Plain):
    """As a library's class."""


OfLibrary.__module__ = "elsewhere"


def from_library():
    return OfLibrary()
