"""The network. It gets its keys of the config, and num_classes, in_channels and image_size if its signature names them."""

# B batch · C channel · H W pixel · K class

from torch import Tensor, nn


class Net(nn.Module):
    """image_BCHW to logits_BK, for images of any size."""

    def __init__(self, in_channels: int, num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(2 * width * 16, num_classes)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        return self.classifier(self.features(image_BCHW))
