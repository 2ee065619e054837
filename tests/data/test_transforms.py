"""Batches on the device come out as torchvision's transforms make them, image by image."""

import numpy as np
import pytest
import torch
from torchvision import transforms

from lockstep.kit.pixels import Frame, Preprocess, resize_nearest

GREY = {"mean": (0.1307,), "std": (0.3081,)}
COLOUR = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)}


def images(channels: int, height: int, width: int, count: int = 5) -> torch.Tensor:
    """Noise, which no resizing hides, and the extremes."""
    values = np.random.default_rng(0).integers(0, 256, (count, channels, height, width)).astype(np.uint8)
    values[0], values[1] = 0, 255
    return torch.from_numpy(values)


def by_torchvision(image_BCHW: torch.Tensor, size: int, mean: tuple, std: tuple) -> torch.Tensor:
    resize = transforms.Resize((size, size), transforms.InterpolationMode.BILINEAR, antialias=True)
    transform = transforms.Compose([transforms.ToTensor(), resize, transforms.Normalize(mean, std)])
    return torch.stack([transform(image_CHW.permute(1, 2, 0).numpy()) for image_CHW in image_BCHW])


@pytest.mark.parametrize(("channels", "statistics"), [(1, GREY), (3, COLOUR)])
@pytest.mark.parametrize(("height", "width", "size"), [(28, 28, 28), (28, 28, 13), (32, 32, 100), (20, 37, 24)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_each_image_is_what_torchvision_makes_of_it(channels, statistics, height, width, size, channels_last):
    image_BCHW = images(channels, height, width)
    made = Preprocess(Frame(size), channels_last=channels_last, **statistics)(image_BCHW)
    assert made.dtype == torch.float32
    assert torch.equal(image_BCHW, images(channels, height, width))  # the stored bytes stay as they are
    if channels > 1:
        assert made.is_contiguous(memory_format=torch.channels_last) == channels_last != made.is_contiguous()
    torch.testing.assert_close(made, by_torchvision(image_BCHW, size, **statistics), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [7, 20, 24, 55])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float32])
def test_masks_take_the_nearest_value(size, dtype):
    masks = images(1, 20, 37).to(dtype)
    resize = transforms.Resize((size, size), transforms.InterpolationMode.NEAREST_EXACT)
    assert torch.equal(resize_nearest(masks, (size, size)), resize(masks.float()).to(dtype))
    assert torch.equal(resize_nearest(masks[:, 0], (size, size)), resize_nearest(masks, (size, size))[:, 0])
