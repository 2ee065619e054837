"""K. Jordan's network for fast training on small images ("94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024, arXiv:2404.00498).

The whitening layer is omitted, because its weights come from the training data.
"""

from collections.abc import Sequence

from torch import Tensor, nn

# B batch · C channel · H W pixel · K class


class AirbenchNet(nn.Module):
    """image_BCHW to logits_BK: three groups of two 3x3 convolutions; each group halves the image.

    `logit_scale` is the paper's 1/9. Each convolution starts as the identity on its first channels.
    """

    def __init__(
        self,
        *,
        in_channels: int = 3,
        num_classes: int = 10,
        image_size: int = 32,
        widths: Sequence[int] = (64, 256, 256),
        logit_scale: float = 1 / 9,
    ) -> None:
        super().__init__()
        smallest = 2 ** len(widths) + 1
        if image_size < smallest:
            raise ValueError(f"data.image_size={image_size}: AirbenchNet needs images of at least {smallest} pixels.")
        stem = 24  # the number of whitened patches in the paper
        groups = [group(n_in, n_out) for n_in, n_out in zip((stem, *widths), widths, strict=False)]
        self.features = nn.Sequential(nn.Conv2d(in_channels, stem, 2), nn.GELU(), *groups)
        self.head = nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes, bias=False))
        self.logit_scale = logit_scale

    def forward(self, image_BCHW: Tensor) -> Tensor:
        return self.head(self.features(image_BCHW)) * self.logit_scale


def group(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        convolution(in_channels, out_channels),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(out_channels, momentum=0.4),
        nn.GELU(),
        convolution(out_channels, out_channels),
        nn.BatchNorm2d(out_channels, momentum=0.4),
        nn.GELU(),
    )


def convolution(in_channels: int, out_channels: int) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    nn.init.dirac_(conv.weight.data[:in_channels])
    return conv
