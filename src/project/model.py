"""The convolutional network of PyTorch's MNIST example (pytorch/examples, mnist/main.py), returning logits."""

# B batch · C channel · H W pixel · K class

from torch import Tensor, nn


class BasicNet(nn.Module):
    """From image_BCHW to logits_BK: two 3x3 convolutions, max-pool, two linear layers. 1.2M parameters on MNIST, 7.4M at 336 px."""

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
        # Images above 87 pixels get a larger pool: at 336 pixels, the first linear layer would have 226 million weights.
        pool = max(2, (image_size - 4) // 28)
        side = (image_size - 4) // pool
        if image_size < 6:  # two convolutions without padding, and the pool
            raise ValueError(f"data.image_size={image_size}: BasicNet needs images of at least 6 pixels.")
        # ReLU after the pool gives the same result as before it, on a quarter of the elements. Both are cheap in
        # channels_last, which is also fast for convolutions. After `Flatten`, the memory format no longer matters.
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(pool), nn.ReLU(), nn.Flatten()
        )
        self.classifier = nn.Sequential(
            nn.Dropout(dropout_conv),
            nn.Linear(64 * side * side, 128),
            nn.ReLU(),
            nn.Dropout(dropout_fc),
            nn.Linear(128, num_classes),
        )

    def forward(self, image_BCHW: Tensor) -> Tensor:
        return self.classifier(self.features(image_BCHW))
