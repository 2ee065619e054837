"""Batches on the device come out as torchvision's transforms make them, image by image."""

import numpy as np
import pytest
import torch
from torchvision import transforms

from lockstep.kit.pixels import Frame, Preprocess, resize_nearest

NOISE = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 3, 20, 37)).astype(np.uint8))


@pytest.mark.parametrize(("channels", "width", "size"), [(1, 37, 24), (3, 37, 24), (3, 20, 20)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_each_image_is_what_torchvision_makes_of_it(channels, width, size, channels_last):
    image_BCHW, mean, std = NOISE[:, :channels, :, :width], (0.49, 0.48, 0.45)[:channels], (0.25, 0.24, 0.26)[:channels]
    batch = Preprocess(Frame(size), mean=mean, std=std, channels_last=channels_last)(image_BCHW)
    assert (batch.stride(1) == 1) == channels_last
    resize, normalize = transforms.Resize((size, size)), transforms.Normalize(mean, std)
    transform = transforms.Compose([transforms.ToTensor(), resize, normalize])
    expected = torch.stack([transform(image_CHW.permute(1, 2, 0).numpy()) for image_CHW in image_BCHW])
    torch.testing.assert_close(batch, expected, atol=1e-5, rtol=0)  # and their dtype


@pytest.mark.parametrize("size", [7, 24, 55])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float32])
def test_masks_take_the_nearest_value(size, dtype):
    mask_BHW = NOISE[:, 0].to(dtype)
    resize = transforms.Resize((size, size), transforms.InterpolationMode.NEAREST_EXACT)
    assert torch.equal(resize_nearest(mask_BHW, (size, size)), resize(mask_BHW.float()).to(dtype))
