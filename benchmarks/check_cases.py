"""LightningModules with their own data, for benchmarks/check_truth.py: kinds of randomness and state, and networks of other libraries.

A module of a library needs it: transformers, x-transformers, vit-pytorch, segmentation-models-pytorch, monai, pytorch-metric-learning, kornia,
diffusers, lightly, torch-geometric.
"""

# mypy: disable-error-code="import-not-found"

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

CLASSES, SAMPLES, BATCH = 4, 96, 16


class Own(pl.LightningModule):
    """A small network on random images."""

    shape: tuple[int, ...] = (3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.net = self.make()

    def make(self) -> nn.Module:
        size = int(torch.tensor(self.shape).prod())
        return nn.Sequential(nn.Flatten(), nn.Linear(size, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def samples(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(SAMPLES, *self.shape, generator=generator)
        return TensorDataset(x, torch.randint(CLASSES, (SAMPLES,), generator=generator))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples(), BATCH, shuffle=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


# --- Kinds of randomness and state ---


class LangevinSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(0.01 * torch.randn_like(parameter))
        return loss


class Langevin(Own):
    def configure_optimizers(self) -> Any:
        return LangevinSGD(self.parameters(), 0.05)


class GradientNoise(Own):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for gradient in (parameter.grad for parameter in self.parameters() if parameter.grad is not None):
            gradient += 0.01 * torch.randn_like(gradient)


class InputNoise(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x + 0.1 * torch.randn_like(x)), y)


class MixedUp(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        other = torch.randperm(len(x), device=x.device)
        return (F.cross_entropy(self(x), y) + F.cross_entropy(self((x + x[other]) / 2), y[other])) / 2


class OfRank(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.global_rank)


class LaterOfRank(Own):
    """Parts at the fourth step, by small steps, beside a mask of infinities."""

    def make(self) -> nn.Module:
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))
        return super().make()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.global_rank * (self.global_step >= 3))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-5)


class OfWorldSize(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.trainer.world_size


class Carried(Own):
    """A hidden state that goes from batch to batch."""

    shape = (5, 6)

    def make(self) -> nn.Module:
        self.state: Tensor | None = None
        self.rnn = nn.GRU(6, 16, batch_first=True)
        return nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        start = None if self.state is None else self.state.mean(1, keepdim=True).expand(-1, len(x), -1).contiguous()
        out, state = self.rnn(x, start)
        self.state = state.detach()
        return self.net(out[:, -1])


class Counted(Own):
    """Its scale depends on how often it was called."""

    def make(self) -> nn.Module:
        self.calls = 0
        return super().make()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / (1 + 0.1 * self.calls)


class CentredByParameter(Own):
    """A parameter without gradient is written in forward."""

    def make(self) -> nn.Module:
        self.center = nn.Parameter(torch.zeros(self.shape), requires_grad=False)
        return super().make()

    def forward(self, x: Tensor) -> Tensor:
        self.center.data.lerp_(x.mean(0), 0.5)
        return super().forward(x - self.center)


class TimeFirst(Own):
    """Dropout of a tensor whose first dimension is the time, as long as the batch."""

    shape = (BATCH, 6)

    def make(self) -> nn.Module:
        self.dropout = nn.Dropout(0.3)
        return nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.dropout(x.transpose(0, 1)).mean(0))


class NoisySamples(Dataset[Any]):
    """Draws from a generator of its own."""

    def __init__(self, samples: Dataset[Any]) -> None:
        self.samples, self.generator = samples, torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        return x + 0.1 * torch.randn(x.shape, generator=self.generator), y


class OwnGenerator(Own):
    def samples(self) -> Dataset[Any]:
        return NoisySamples(super().samples())


class Teacher(Own):
    """A teacher that follows the weights."""

    def make(self) -> nn.Module:
        self.teacher = super().make().requires_grad_(False)
        return super().make()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + F.mse_loss(self(batch[0]), self.teacher(batch[0]))

    def on_train_batch_end(self, *_: Any) -> None:
        for mine, own in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.data.lerp_(own.data, 0.1)


class ByHand(Own):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Scheduled(Own):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.01, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


# --- Networks and losses of libraries ---


class Bert(Own):
    """The gradient of the keys' bias is rounding only."""

    shape = (12,)
    attention = 0.0

    def make(self) -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "vocab_size": 50,
        }
        return BertForSequenceClassification(
            BertConfig(**sizes, num_labels=CLASSES, attention_probs_dropout_prob=self.attention)
        )

    def samples(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(50, (SAMPLES, *self.shape), generator=generator)
        return TensorDataset(tokens, torch.randint(CLASSES, (SAMPLES,), generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).logits

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class BertAttention(Bert):
    attention = 0.3


class TimmVit(Own):
    shape = (3, 32, 32)

    def make(self) -> nn.Module:
        import timm

        return timm.create_model("test_vit", img_size=32, num_classes=CLASSES, drop_path_rate=0.3, proj_drop_rate=0.1)


class TorchvisionResNet(Own):
    shape = (3, 32, 32)

    def make(self) -> nn.Module:
        from torchvision.models.resnet import BasicBlock, ResNet

        return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=64)


class TorchvisionVit(Own):
    shape = (3, 32, 32)

    def make(self) -> nn.Module:
        from torchvision.models import VisionTransformer

        net = VisionTransformer(32, 16, 2, 2, 16, 32, attention_dropout=0.3, num_classes=CLASSES)
        nn.init.normal_(net.heads.head.weight)
        return net


class XTransformer(Own):
    shape = (12, 16)

    def make(self) -> nn.Module:
        from x_transformers import Encoder

        self.head = nn.Linear(16, CLASSES)
        return Encoder(dim=16, depth=2, heads=2, ff_dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x).mean(1))


class SimpleVit(Own):
    shape = (3, 32, 32)

    def make(self) -> nn.Module:
        from vit_pytorch import SimpleViT

        return SimpleViT(image_size=32, patch_size=16, num_classes=CLASSES, dim=16, depth=2, heads=2, mlp_dim=32)


class SegmentationUnet(Own):
    shape = (3, 32, 32)

    def make(self) -> nn.Module:
        import segmentation_models_pytorch

        return segmentation_models_pytorch.Unet("resnet18", encoder_weights=None, classes=CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        return F.cross_entropy(self(x), (x[:, 0] > 0).long())


class MonaiUnet(Own):
    shape = (1, 16, 16)

    def make(self) -> nn.Module:
        from monai.networks.nets import UNet

        return UNet(2, 1, CLASSES, channels=(4, 8, 16), strides=(2, 2), dropout=0.2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        return F.cross_entropy(self(x), (x[:, 0] > 0).long())


class Triplets(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        from pytorch_metric_learning.losses import TripletMarginLoss

        x, y = batch
        return TripletMarginLoss()(self(x), y)


class KorniaAugmented(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        from kornia.augmentation import RandomHorizontalFlip

        x, y = batch
        return F.cross_entropy(self(RandomHorizontalFlip(p=0.5)(x)), y)


class Diffusion(Own):
    shape = (3, 16, 16)

    def make(self) -> nn.Module:
        from diffusers import UNet2DModel

        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        return UNet2DModel(16, 3, 3, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, **blocks)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        noise = torch.randn_like(x)
        return F.mse_loss(self.net(x + noise, torch.zeros(len(x), device=x.device)).sample, noise)


class Contrasted(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        from lightly.loss import NTXentLoss

        x, _ = batch
        return NTXentLoss()(self(x), self(x.flip(-1)))


class DenseGraph(Own):
    shape = (6, 5)

    def make(self) -> nn.Module:
        from torch_geometric.nn import DenseGCNConv

        self.head = nn.Linear(8, CLASSES)
        return DenseGCNConv(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        linked = (x @ x.mT > 0).to(x.dtype)
        return self.head(self.net(x, linked).mean(1))
