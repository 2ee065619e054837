"""LightningModules and dataloaders of a user's, for tests/training/test_custom_module.py."""

import json
import os
import random
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate, random_split

SIZES: list[int] = []  # what Named got
DRAWN: list[list[int]] = []  # by Lazy


class Small(pl.LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.Dropout(0.1), nn.Linear(width, 10))

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.layers(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Late(Small):
    """Builds its layers in configure_model, and runs out of memory."""

    def __init__(self):
        pl.LightningModule.__init__(self)

    def configure_model(self):
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.Dropout(0.1))

    def on_before_optimizer_step(self, optimizer):
        assert self.layers[2].layer == "layers.2"  # masks by row
        raise torch.OutOfMemoryError("CUDA out of memory.")


class Validated(Small):
    def validation_step(self, batch, batch_idx):
        self.log("valid_loss", self.loss(batch))


class Tested(Small):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), batch_size=len(batch[0]))


class Template(pl.LightningModule):
    """As in the Lightning-Hydra template: its config makes its network, and partials of its optimizer and schedule."""

    def __init__(self, net, optimizer, scheduler):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.layers = net

    loss, training_step, validation_step = Validated.loss, Validated.training_step, Validated.validation_step

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        logits = self.layers(batch[0])
        return {"digit": logits.argmax(1), "logits": logits}

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Epochwise(Template):
    """Its schedule steps by epochs, as Lightning's do unless they say otherwise."""

    def configure_optimizers(self):
        config = super().configure_optimizers()
        return [config["optimizer"]], [config["lr_scheduler"]["scheduler"]]


class Fixed(Template):
    """Has an optimizer of its own, and takes the config's."""

    configure_optimizers = Small.configure_optimizers


class Kept(Template):
    """Keeps its network under the argument's name."""

    def __init__(self, net, optimizer, scheduler):
        super().__init__(net, optimizer, scheduler)
        del self.layers
        self.net = net

    def layers(self, x):
        return self.net(x)


class Flipped(Kept):
    def forward(self, x):
        return self.net(x.flip(-1))


class Backwards(Kept):
    """Its `forward` takes numbers, as a generator's does."""

    def forward(self, z):
        return self.net(z.reshape(-1, 3))


class Named(Small):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "twice": 2 * batch["input"]}

    def loss(self, batch):
        SIZES.append(len(batch["index"]))
        return F.cross_entropy(self.layers(batch["twice"]), batch["target"])

    def validation_step(self, batch, batch_idx):
        self.loss(batch)


class Predicts(Small):
    """Its columns depend on the batch, and on the variable KIND."""

    def predict_step(self, batch, batch_idx):
        digits = batch[1].tolist()
        columns = {
            "later": {"odd": ["a"] * len(digits)} if digits[0] == 2 else {"rest": digits},
            "ragged": {
                "tensor": [torch.arange(digit) for digit in digits],
                "array": [{"boxes": [np.zeros(digit, np.float32)]} for digit in digits],
                "text": ["a\ud800b"] * len(digits),
            },
            "types": {"found": [digit if digit % 2 else [digit] for digit in digits]},
            "scalar": {"found": 3},
        }
        return {"digit": batch[1], **columns[os.environ["KIND"]]}


class TwoOptimizers(Validated):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), 0.1) for layer in (self.layers[1], self.layers[3])]


class Reads(Small):
    """Asks for the number of steps, so Lightning makes the dataloaders early."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("test_loss", self.loss(batch))


class WithLoader(Validated):
    def val_dataloader(self):
        return []


class Unplain(Small):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {"path": [self.hparams]}


class Data(pl.LightningDataModule):
    """Batches of 12 of 48 random images, in an order of torch's generator."""

    def __init__(self, num_workers: int = 0):
        super().__init__()
        self.num_workers = num_workers

    def images(self, count):
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.rand(count, 1, 28, 28, generator=generator), torch.arange(count) % 10)

    def train_dataloader(self):
        workers = {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        return DataLoader(self.images(48), batch_size=12, shuffle=True, **workers)


class Endless(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(1, 28, 28), torch.tensor(3))] * 48)


class Stream(Data):
    """Nobody knows how long it is."""

    def train_dataloader(self):
        return DataLoader(Endless(), batch_size=12)


class Random(IterableDataset):
    """Images, and nobody knows how many."""

    def __init__(self, count=40):
        self.count = count

    def __iter__(self):
        for number in range(self.count):
            yield torch.rand(1, 28, 28) + random.random(), torch.tensor(number % 10)


class RandomStream(Data):
    def train_dataloader(self):
        return DataLoader(Random(), batch_size=12, num_workers=self.num_workers)


class Drawn:
    """Draws each batch from Python's generator when it is due."""

    def __len__(self):
        return 4

    def __iter__(self):
        for _ in range(4):
            DRAWN.append(random.sample(range(48), 12))
            yield DRAWN[-1]


class Lazy(Data):
    def train_dataloader(self):
        return DataLoader(self.images(48), batch_sampler=Drawn())


class Uneven(Data):
    """An epoch is 12 + 12 + 12 + 12 + 3 images: two processes have 2 and 1 of the last ones, and of two micro-batches each one is empty."""

    count = 51

    def train_dataloader(self):
        return DataLoader(self.images(self.count), batch_size=12, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self):
        return DataLoader(self.images(25), batch_size=12)


class Declared(Data):
    """Declares 96 samples and yields 48."""

    def train_dataloader(self):
        return DataLoader(self.images(48), batch_size=12, sampler=Half())


class Half:
    def __iter__(self):
        return iter(range(48))

    def __len__(self):
        return 96


class ByRank(Data):
    """Divides the samples itself."""

    def train_dataloader(self):
        return DataLoader(self.images(48), batch_size=12, sampler=range(self.trainer.global_rank, 48, 2))


class UnevenStream(Uneven):
    def train_dataloader(self):
        return DataLoader(Random(51), batch_size=12, num_workers=self.num_workers)


class Smooth(Validated):
    """Without dropout, so the result is the same on any number of processes."""

    def __init__(self):
        super().__init__()
        self.layers[2] = nn.Identity()

    def validation_step(self, batch, batch_idx):
        self.log("valid_loss", self.loss(batch), sync_dist=True)
        self.log("valid_count", float(len(batch[1])), sync_dist=True, reduce_fx="sum")


class Manual(Smooth):
    """Two backward passes in each step."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(self.loss((batch[0] / 2, batch[1])))
        optimizer.step()


class Pair(Uneven):
    """Two loaders at once, of which the second is the shorter one. Their shares are equal."""

    count = 52

    def train_dataloader(self):
        return [super().train_dataloader(), DataLoader(self.images(24), batch_size=12, shuffle=True)]


class Both(Smooth):
    def training_step(self, batch, batch_idx):
        return self.loss(batch[0]) + self.loss(batch[1])


class Whole(Smooth):
    """With dataloaders of its own."""

    def train_dataloader(self):
        return Uneven().train_dataloader()

    def val_dataloader(self):
        return Uneven().val_dataloader()


class Counts(Whole):
    """Of 7 validation samples in batches of 4."""

    def validation_step(self, batch, batch_idx):
        self.log("valid_loss", self.loss(batch), sync_dist=True)
        self.log("valid_count", float(len(batch[1])), sync_dist=True, reduce_fx="sum")

    def val_dataloader(self):
        return DataLoader(Data().images(7), batch_size=4)


class Plateau(Whole):
    """Its scheduler has the value of one process."""

    def validation_step(self, batch, batch_idx):
        self.last = self.loss(batch)
        self.log("valid_all", self.last)

    def on_validation_epoch_end(self):
        self.log("valid_loss", self.last)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "valid_loss"}}


LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class Surroundings(Whole):
    """Notes what a launcher's variables are where its batches are made and used, in the folder NOTES."""

    def note(self, place):
        found = {name: os.environ[name] for name in LAUNCHER if name in os.environ}
        Path(os.environ["NOTES"], f"{place}-{self.global_rank}").write_text(json.dumps(found))

    def collate(self, samples):
        self.note("worker")
        return default_collate(samples)

    def train_dataloader(self):
        self.note("train_dataloader")
        return DataLoader(Data().images(24), batch_size=12, num_workers=1, collate_fn=self.collate)

    def test_dataloader(self):
        self.note("test_dataloader")
        return DataLoader(Data().images(24), batch_size=12)

    def test_step(self, batch, batch_idx):
        self.note("test_step")

    def teardown(self, stage):
        self.note("teardown")


class Redrawn(Data):
    """A new subset for each epoch."""

    def train_dataloader(self):
        return DataLoader(Subset(self.images(96), torch.randperm(96)[:48].tolist()), batch_size=12, shuffle=True)


class TakesIterator(Small):
    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


class OfRank0(Whole):
    """Two values of its own loss are those of the last batch of each process."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.last = self.loss(batch)
        self.log("valid_all", self.last)
        if self.global_rank == self.trainer.world_size - 1:
            self.log("valid_some", self.last)
        if self.global_rank == 0:
            self.log("valid_main", self.last, rank_zero_only=True)

    def on_validation_epoch_end(self):
        self.log("valid_loss", self.last)

    def test_step(self, batch, batch_idx):
        self.last = self.loss(batch)
        self.log("test_all", self.last)
        self.log("test_synced", self.last, sync_dist=True)

    def on_test_epoch_end(self):
        self.log("test_loss", self.last)

    def test_dataloader(self):
        return Uneven().val_dataloader()


class Values(pl.LightningModule):
    """Logs means of the values that its samples have."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        values_B = batch[0]
        self.log("epoch_mean", values_B.mean(), on_step=False, on_epoch=True)
        self.log("epoch_synced", values_B.mean(), on_step=False, on_epoch=True, sync_dist=True)
        return self.layer(values_B[:, None] / 16).square().mean()

    def on_validation_epoch_start(self):
        self.total, self.count = 0.0, 0

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("valid_mean", batch[0].mean())
        if dataloader_idx == 0:
            self.total, self.count = self.total + batch[0].sum(), self.count + len(batch[0])

    def on_validation_epoch_end(self):
        self.log("valid_hook", self.total / self.count, batch_size=self.count, sync_dist=True)

    def loader(self, count):
        return DataLoader(TensorDataset(torch.arange(float(count))), batch_size=5)

    def train_dataloader(self):
        return self.loader(16)

    def val_dataloader(self):
        return [self.loader(16), self.loader(8)]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Boring(BoringModel):
    """Of Lightning's demos: loaders of its own, whose batches have one sample."""


class LateByRank(Data):
    """Whose rank is seen in the third batch."""

    def train_dataloader(self):
        order = [*range(24), *range(24 + self.trainer.global_rank, 48)]
        return DataLoader(self.images(48), batch_size=12, sampler=order)


class StreamByRank(Data):
    """Whose samples are seen to be others in each process before the first step."""

    def train_dataloader(self):
        return DataLoader(Sharded(self.trainer), batch_size=12)


class Sharded(Random):
    def __init__(self, trainer):
        super().__init__()
        self.trainer = trainer

    def __iter__(self):
        rank = self.trainer.global_rank
        return (each for number, each in enumerate(super().__iter__()) if number % self.trainer.world_size == rank)


class Finished:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


class Alike(Data):
    """Batches that cannot be taken apart."""

    def train_dataloader(self):
        return Finished(super().train_dataloader())


class TwoTests(Data):
    def test_dataloader(self):
        return [DataLoader(self.images(12)), DataLoader(self.images(24))]


class Halves(pl.LightningDataModule):
    """Draws its samples when it is made, and a split in setup."""

    def __init__(self):
        super().__init__()
        self.x = torch.rand(20, 784)

    def setup(self, stage):
        self.train, self.test = random_split(TensorDataset(self.x, torch.arange(20) % 10), [12, 8])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=4)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=4)


class WithoutOptimizer(Small):
    """Trains nothing, and notes the sum of what it sees."""

    def training_step(self, batch, batch_idx):
        self.log("train_sum", batch[0].sum(), on_step=False, on_epoch=True, reduce_fx="sum")

    def test_step(self, batch, batch_idx):
        self.log("test_sum", batch[0].sum(), reduce_fx="sum")

    def configure_optimizers(self):
        return None


class Shapeless(Small):
    """Lazy layers, a mean of each epoch, and loaders with positional arguments."""

    def __init__(self):
        pl.LightningModule.__init__(self)
        self.layers = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 3))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def forward(self, batch):
        return self.layers(batch[0])

    def train_dataloader(self):
        draw = torch.Generator().manual_seed(0)
        x, y = torch.randn(40, 5, generator=draw), torch.randint(3, (40,), generator=draw)
        return DataLoader(TensorDataset(x, y), 8, False)

    val_dataloader = test_dataloader = train_dataloader


def joined(samples):
    """Graphs of several sizes as one: the nodes, the graph of each, a target for each graph."""
    nodes, targets = zip(*samples, strict=True)
    sizes = torch.tensor([len(each) for each in nodes])
    return torch.cat(nodes), torch.arange(len(nodes)).repeat_interleave(sizes), torch.stack(targets)


class Graphs(pl.LightningModule):
    """Logs the mean over the graphs of each batch, without their number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def errors(self, batch):
        nodes, graph, target = batch
        sums = torch.zeros(len(target), 1).index_add(0, graph, self.layer(nodes))
        return (sums[:, 0] - target).abs()

    def training_step(self, batch, batch_idx):
        return self.errors(batch).mean()

    def test_step(self, batch, batch_idx):
        self.log("test_error", self.errors(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(graphs(), batch_size=4, collate_fn=joined)

    test_dataloader = train_dataloader


def graphs():
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 2, generator=draw), torch.randn((), generator=draw))
        for size in (9, 1, 2, 8, 3, 7, 1, 1, 5, 2)
    ]
