"""The convolutional network of PyTorch's MNIST example (pytorch/examples, mnist/main.py), returning logits."""

# B batch · C channel · H W pixel · K class

import torch
from torch import Tensor, nn

BYTE, TWO_BYTES = (torch.int8, 8), (torch.int16, 16)


class Dropout(nn.Dropout):
    """torch's dropout, except that on CPUs an element takes 8 random bits (16 if `p` is not a multiple of 1/256) instead of
    a whole draw.

    torch.bernoulli_ calls the generator for each element: 3.9 ms for BasicNet's 589,824 elements; this takes 0.6. A step takes 12.
    `p` is rounded to 1/65536.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not 0 < self.p < 1 or not x.is_cpu:
            return super().forward(x)
        dtype, bits = BYTE if (self.p * 256).is_integer() else TWO_BYTES
        values, each = 2**bits, 64 // bits
        dropped = min(round(self.p * values), values - 1)  # out of `values`
        drawn = torch.empty(-(-x.numel() // each), dtype=torch.int64).random_(-(2**63), None)
        drawn_like_x = drawn.view(dtype)[: x.numel()].as_strided(x.shape, torch.empty_like(x).stride())
        kept = drawn_like_x >= dropped - values // 2  # they are signed
        return torch.mul(x, kept.to(x.dtype).mul_(values / (values - dropped)))


class BasicNet(nn.Module):
    """image_BCHW to logits_BK: two 3x3 convolutions, max-pool, two linear layers. 1.2 million parameters on MNIST."""

    smallest_image = 6  # two convolutions without padding, then the pool; a check reads it

    def __init__(
        self,
        *,
        in_channels: int = 1,
        num_classes: int = 10,
        image_size: int = 28,
        dropout_conv: float = 0.25,
        dropout_fc: float = 0.5,
    ) -> None:
        super().__init__()
        side = (image_size - 4) // 2
        if image_size < self.smallest_image:
            raise ValueError(
                f"data.image_size={image_size}: BasicNet needs images of at least {self.smallest_image} pixels."
            )
        # ReLU after the pool gives the same numbers as before it, from a quarter of the elements. Both are cheap
        # in channels_last, which is also fast for convolutions; from `Flatten` on there is one order.
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            Dropout(dropout_conv),
            nn.Linear(64 * side * side, 128),
            nn.ReLU(),
            Dropout(dropout_fc),
            nn.Linear(128, num_classes),
        )

    def forward(self, image_BCHW: Tensor) -> Tensor:
        return self.classifier(self.features(image_BCHW))
