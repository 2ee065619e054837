"""Each operation gives what torchvision's gives for one image and the same draws: odd and non-square sizes, grey and colour.

Bytes may differ by one level, where float32 arithmetic of another order rounds to another side.
"""

import numpy as np
import pytest
import torch
from images import cases, new_draws
from torch import Tensor

from lockstep.kit.augment import Operation, RandomErasing

SIZES = [(1, 28, 28), (3, 21, 34), (3, 33, 20)]
COUNT = 64


def images(channels: int, height: int, width: int) -> Tensor:
    """Smooth shapes, noise, and the extremes."""
    random = np.random.default_rng(0)
    noise = torch.from_numpy(random.integers(0, 256, (COUNT, channels, height, width)).astype(np.uint8))
    coarse = torch.from_numpy(random.integers(0, 256, (COUNT, channels, 4, 4)).astype(np.float32))
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear").round().to(torch.uint8)
    mixed = torch.where(torch.arange(COUNT)[:, None, None, None] % 2 == 0, noise, smooth)
    mixed[-1], mixed[-2] = 0, 255
    mixed[-3] = mixed[-3] // 4 + 90  # a narrow range
    return mixed


def changed(operation: Operation, image: Tensor, **more: Tensor) -> dict:
    batch = {"input": image, "index": torch.arange(COUNT), "count": COUNT, **more}
    return operation(batch, new_draws(COUNT))


def assert_close(name: str, operation: Operation, image: Tensor, reference) -> None:
    made = changed(operation, image)["input"]
    expected = torch.stack([reference(one, place) for place, one in enumerate(image)])
    assert (made.dtype, made.shape) == (expected.dtype, expected.shape)
    assert not torch.equal(made, image)
    assert ((made.int() - expected.int()).abs() <= 1).all(), name


@pytest.mark.parametrize("size", SIZES)
def test_operations_are_torchvisions(size):
    image = images(*size)
    for name, (operation, reference) in cases(image).items():
        assert_close(name, operation, image, reference)


def test_noise_differs_between_samples_and_covers_the_box():
    image, operation = images(3, 32, 32), RandomErasing(probability=0.8, scale=(0.02, 0.4))
    boxes = operation.boxes(32, 32, new_draws(COUNT))
    made, found = changed(operation, image)["input"], set()
    for place, (top, left, height, width) in enumerate(boxes.tolist()):
        inside = torch.zeros(32, 32, dtype=torch.bool)
        inside[top : top + height, left : left + width] = True
        assert torch.equal(made[place][:, ~inside], image[place][:, ~inside])
        if height:
            noise = made[place][:, inside].float()
            assert 90 < noise.mean() < 165 and noise.std() > 50
            found.add(tuple(noise.flatten()[:12].tolist()))
    assert len(found) == (boxes[:, 2] > 0).sum() and 40 < len(found) < COUNT
