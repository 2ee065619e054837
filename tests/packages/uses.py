"""LightningModules that use their parameters in every way, for tests/strategies/test_any_module.py."""

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.image.fid import FrechetInceptionDistance

WIDTH = 8


class Rows(IterableDataset):
    def __iter__(self):
        return zip(torch.ones(11, WIDTH), strict=True)


class Base(pl.LightningModule):
    """80 rows: two epochs of 10 steps."""

    def train_dataloader(self):
        rows = torch.Generator().manual_seed(1)
        x = torch.randn(80, WIDTH, generator=rows)
        return DataLoader(TensorDataset(x, x.roll(1, 1) * 0.5), batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.train_dataloader().dataset, batch_size=8)

    def outputs(self, x):
        return self(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.outputs(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("valid_loss", F.mse_loss(self.outputs(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Block(nn.Module):
    """Composite, so it is a block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.layer(self.norm(x)).tanh()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, WIDTH))


class Plain(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x):
        return self.net(x)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])[:, 0]

    def predict_dataloader(self):
        """A stream, whose samples have places only."""
        return DataLoader(Rows(), batch_size=8)


class Small(Base):
    """Without a block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.first(x).relu())


class Late(Plain):
    """Makes its network where Lightning's documentation does, and more than once."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = network()


class Beside(Plain):
    """Parameters next to its children, one of them without a dimension, one of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def outputs(self, x):
        return self(x * self.scale) * self.temperature + self.shift.float()


class Features(nn.Module):
    """As timm's networks: used without `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward_features(self, x):
        return self.blocks(x + self.position)

    def forward_head(self, x):
        return self.head(x)


class UsesMethods(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = Features()

    def outputs(self, x):
        return self.net.forward_head(self.net.forward_features(x))


class NoGradEncoder(Base):
    """A frozen part that computes without gradients, and one that is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle, self.head = network(), network(), nn.Linear(WIDTH, WIDTH)
        self.encoder.requires_grad_(False)

    def outputs(self, x):
        with torch.no_grad():
            x = self.encoder(x)
        return self.head(self.middle(x)) + self.middle(x).detach()


class Tied(Base):
    """One weight in two children, and one inside and outside of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.net, self.head = nn.Linear(WIDTH, WIDTH), network(), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight
        self.net[0].weight = self.net[1].layer.weight

    def outputs(self, x):
        return self.head(self.net(self.embed(x))) + F.linear(x, self.embed.weight)


class WithBuffers(Plain):
    """A mean of what it has seen, which its outputs depend on, of each process's own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def outputs(self, x):
        return self(x) + self.seen

    def training_step(self, batch, batch_idx):
        self.seen.lerp_(self.all_gather(batch[0]).flatten(0, -2).mean(0), 0.1)
        return super().training_step(batch, batch_idx)


class Momentum(Plain):
    """A teacher that follows by assigned data: at a step's start, and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def follow(self, other, m):
        for mean, own in zip(other.parameters(), self.net.parameters(), strict=True):
            mean.data = mean.data * m + own.data * (1 - m)

    def training_step(self, batch, batch_idx):
        self.follow(self.teacher, 0.9)
        x, _ = batch
        return super().training_step(batch, batch_idx) + 0.1 * F.mse_loss(self(x), self.teacher(x) + self.slow(x))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.follow(self.slow, 0.5)


class InPlaceData(Plain):
    """A teacher that follows by writing into data, and a student that others look at in between."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        for mean, own in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mean.data.mul_(0.9).add_(0.1 * own.detach().data)
        self.net[0].weight.data[0] *= 0.9
        self.net.state_dict()
        self.teacher[0].load_state_dict({name: value * 0.5 for name, value in self.teacher[0].state_dict().items()})
        x, _ = batch
        return super().training_step(batch, batch_idx) + 0.1 * F.mse_loss(self.net(x), self.teacher(x))


class Frozen(Plain):
    """Freezes a layer in a step, and one before the first."""

    def on_train_start(self):
        self.net[3].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.net[0].requires_grad_(self.current_epoch == 0)
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


class Looks(Plain):
    """Hooks that read weights and gradients, and act on what they read."""

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.net.parameters():
            parameter.grad.mul_(min(1.0, 0.1 / (float(parameter.grad.norm()) + 0.01)))
        self.log("norm", self.net[0].weight.grad.norm())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.net[1].layer.weight.abs().max().item() > 0.3:
            with torch.no_grad():
                self.net[1].layer.weight.mul_(0.99)
        self.log("weight", self.net[0].weight.norm().item())


class OfSome(Small):
    """Scalars that each process has a gradient of in its own steps."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(1.0)) for _ in range(3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        losses = [
            F.mse_loss(self(row) * self.scales[int(row.sum() > 0)], target) for row, target in zip(x, y, strict=True)
        ]
        return torch.stack(losses).mean()


class Unguarded(Plain):
    """Makes its network anew whenever it is asked to."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)

    def configure_model(self):
        self.net = network()

    def test_dataloader(self):
        return self.val_dataloader()

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)


class InPlace(Plain):
    """Clips its weights where they are."""

    @torch.no_grad()
    def training_step(self, batch, batch_idx):
        self.net[0].weight.clamp_(-0.2, 0.2)
        with torch.enable_grad():
            return super().training_step(batch, batch_idx)


class GAN(Base):
    """The discriminator's step lies between two forwards of the generator, whose parameters have no gradient then."""

    generator_of: Any = staticmethod(network)

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = (
            self.generator_of(),
            nn.Sequential(self.generator_of(), nn.Linear(WIDTH, 1)),
        )
        self.noise = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return self.generator(x + self.noise)

    def training_step(self, batch, batch_idx):
        x, y = batch
        of_d, of_g = self.optimizers()
        self.toggle_optimizer(of_d)
        loss = F.softplus(-self.discriminator(y)).mean() + F.softplus(self.discriminator(self(x).detach())).mean()
        self.backward_of(loss)
        self.clip_gradients(of_d, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        of_d.step()
        of_d.zero_grad()
        self.untoggle_optimizer(of_d)
        self.toggle_optimizer(of_g)
        loss = F.softplus(-self.discriminator(self(x) + 0.1 * self.noise)).mean()
        self.backward_of(loss)
        of_g.step()
        of_g.zero_grad()
        self.untoggle_optimizer(of_g)

    def backward_of(self, loss):
        self.manual_backward(loss)

    def validation_step(self, batch, batch_idx):
        self.log("valid_loss", self.discriminator(self(batch[0])).mean(), sync_dist=True)

    def configure_optimizers(self):
        of_g = [*self.generator.parameters(), self.noise]
        return torch.optim.SGD(self.discriminator.parameters(), 0.1), torch.optim.SGD(of_g, 0.1)


class SmallGAN(GAN):
    generator_of = staticmethod(lambda: nn.Linear(WIDTH, WIDTH))


class RawGAN(SmallGAN):
    """Without Lightning's backward."""

    def backward_of(self, loss):
        loss.backward()


class Fails(Plain):
    def forward(self, x):
        raise ValueError("in forward")


class RawOptimizers(SmallGAN):
    """torch's own optimizers, and a network's zero_grad."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        of_d, of_g = self.optimizers(use_pl_optimizer=False)
        for optimizer in (of_d, of_g, of_g):
            self.generator.zero_grad()
            self.discriminator.zero_grad()
            self.backward_of(
                F.softplus(-self.discriminator(self.generator(x))).mean() + self.generator(x).square().mean()
            )
            self.discriminator(self.generator(x))
            optimizer.step()


class TwoBackwards(SmallGAN):
    """Gradients of two losses, by module.zero_grad and a forward in between."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.zero_grad()
        self.backward_of(F.mse_loss(self(x), y))
        self.backward_of(F.mse_loss(self(x * 2), y) + self.discriminator(self.generator(x)).square().mean())
        for optimizer in self.optimizers():
            optimizer.step()


class Penalty(Plain):
    """The gradient of an output by its input is part of the loss."""

    def training_step(self, batch, batch_idx):
        x = batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(self(x).tanh().sum(), x, create_graph=True)
        return super().training_step(batch, batch_idx) + (slope.norm(2, 1) - 1).square().mean()


class SmallPenalty(Penalty, Small):
    def __init__(self) -> None:
        Small.__init__(self)

    forward = Small.forward


class Closures(Plain):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)


class Searches(Plain):
    """Its optimizer compares losses, and evaluates the closure until one is small enough."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 0.5, max_iter=6, line_search_fn="strong_wolfe")


class Extractor(nn.Module):
    num_features = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 4, WIDTH)

    def forward(self, x):
        return self.layer(x.flatten(1).float() / 255)


class Metered(Plain):
    """A metric with a network of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fid = FrechetInceptionDistance(feature=Extractor(), normalize=True, input_img_size=(3, 2, 2))

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        images = [each.repeat(1, 2)[:, :12].view(-1, 3, 2, 2).sigmoid() for each in (batch[1], self(batch[0]))]
        self.fid.update(images[0], real=True)
        self.fid.update(images[1], real=False)

    def on_validation_epoch_end(self):
        self.log("fid", self.fid.compute())
        self.fid.reset()
        assert self.net(torch.ones(1, WIDTH)).shape == (1, WIDTH)  # outside of a step
        self.log("mean", self(torch.ones(1, WIDTH)).mean())


class Generates(Base):
    """As a language model of Hugging Face: `generate` calls the network many times."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def outputs(self, x):
        return self.model(x)

    def generate(self, x):
        for _ in range(3):
            x = self.model(x)
        return x

    def validation_step(self, batch, batch_idx):
        self.log("valid_loss", F.mse_loss(self.generate(batch[0]), batch[1]), sync_dist=True)


class OfEarlier(Plain):
    """An optimizer that gets more parameters in a step."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            self.optimizers().add_param_group({"params": [self.net[3].bias]})
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[0].parameters(), 0.1)


class Replaces(Plain):
    def training_step(self, batch, batch_idx):
        self.net[0].bias = nn.Parameter(self.net[0].bias * 0.9)
        return super().training_step(batch, batch_idx)


class OutOfBlock(Plain):
    """Uses the layer of a block without the block."""

    def outputs(self, x):
        return self.net[1].layer(x)


class MadeBefore(Plain):
    """An optimizer with parameters from before they were sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)

    def configure_optimizers(self):
        return self.optimizer


class Normed(Base):
    """Statistics and masks of a batch."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.net = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x):
        return self.net(x)
