"""Each operation gives what torchvision's gives for one image and the same draws: odd and non-square sizes, grey and colour.

Bytes may differ by one level, where float32 arithmetic of another order rounds to another side.
"""

import numpy as np
import pytest
import torch
from images import cases, new_draws, policy
from torch import Tensor
from torchvision.transforms import v2 as tv

from lockstep.augment import Operation, RandAugment, RandomErasing, RandomResizedCrop, Rotate, TrivialAugment
from lockstep.augment.transforms import BINS, BLENDS, MOVING, NAMES
from lockstep.data.pixels import resize_nearest

SIZES = [(1, 28, 28), (3, 21, 34), (3, 33, 20)]
COUNT = 64
# The fraction of pixels that may differ by more than a level. Rotations and shears: pixels in the middle between two, where rounding
# decides which one is nearest. The others: one level of an earlier change that a later one has multiplied.
MAY_DIFFER = {"rotate": 0.01, "shear_x": 0.01, "shear_y": 0.01, "color_jitter": 0.01, "trivial": 0.01, "rand": 0.01}


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
    assert not torch.equal(made, image) or name in ("identity", "color")
    far = ((made.int() - expected.int()).abs() > 1).float().mean()
    assert far <= MAY_DIFFER.get(name, 0.0), f"{far:.4f} of the pixels differ by more than a level"


@pytest.mark.parametrize("size", SIZES)
def test_operations_are_torchvisions(size):
    image = images(*size)
    for name, (operation, reference) in cases(image).items():
        assert_close(name, operation, image, reference)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [TrivialAugment, RandAugment])
def test_operations_of_policies_are_torchvisions(kind, name):
    """Those of TrivialAugment at the magnitudes that are drawn."""
    operation = kind(operations=[name], **({"count": 1} if kind is RandAugment else {}))
    for image in (images(*size) for size in SIZES):
        assert_close(name, operation, image, policy(operation, image, 1))


@pytest.mark.parametrize(("kind", "theirs"), [(TrivialAugment, tv.TrivialAugmentWide), (RandAugment, tv.RandAugment)])
def test_magnitudes_are_torchvisions(kind, theirs):
    spellings = {"autocontrast": "AutoContrast"}
    for name in NAMES[:-1]:  # torchvision's policies do not invert
        spelled = spellings.get(name) or name.title().replace("_", "")
        magnitudes, signed = theirs()._AUGMENTATION_SPACE[spelled]
        assert signed == (name in (*MOVING, *BLENDS))
        if (expected := magnitudes(BINS, 31, 44)) is not None:
            if name.startswith("translate"):  # its affine takes whole pixels; 16 pixels are 15.999999 in its float32
                expected = (expected + 1e-3).trunc()
            expected = expected * 255 if name == "solarize" else expected
            np.testing.assert_allclose(kind.space.magnitudes(name, 31, 44), expected, rtol=1e-5, atol=1e-4)


def test_each_image_of_a_policy_has_its_own_operation_magnitude_and_sign():
    names, magnitudes = TrivialAugment().magnitudes(new_draws(5000), 30, 31)
    assert {*names.tolist()} == {*NAMES[:-1]}
    for name in NAMES[:-1]:
        of_name = magnitudes[names == name]
        assert 250 < len(of_name) < 470  # 357 in the mean
        kinds = {"identity": None, "autocontrast": None, "equalize": None, "posterize": 7, "solarize": 31}
        if (distinct := kinds.get(name, 61)) is not None:
            assert len({*of_name.tolist()}) > 0.9 * distinct - 2 * name.startswith("translate")
    fixed = RandAugment(magnitude=0, count=1).magnitudes(new_draws(5000), 30, 31)[1]
    assert {*fixed[np.isin(names, BLENDS)].tolist()} <= {0.0, 1.0, 8.0, 255.0}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float32])
def test_crops_of_masks_are_nearest(dtype):
    operation, image = RandomResizedCrop(scale=(0.05, 1.0), ratio=(0.4, 2.5), image_size=24), images(3, 21, 34)
    made = changed(operation, image, target=image[:, 0].to(dtype))["target"]
    assert made.dtype == dtype
    for place, (top, left, height, width) in enumerate(operation.plan(21, 34, new_draws(COUNT)).tolist()):
        box = image[place, 0, top : top + height, left : left + width].to(dtype)
        assert torch.equal(made[place], resize_nearest(box, (24, 24)))  # tests/data/test_transforms.py compares it


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_uncovered_pixels_are_filled(interpolation):
    image = torch.full((COUNT, 3, 20, 20), 200, dtype=torch.uint8)
    operation = Rotate(degrees=45, interpolation=interpolation, fill=7, mask_fill=-1)
    made = changed(operation, image, target=torch.ones(COUNT, 20, 20))
    assert {*made["target"].unique().tolist()} == {-1.0, 1.0}
    assert int(made["input"].min()) == 7 and int(made["input"].max()) == 200
    assert (made["input"][:, 0, 0, 0] == 7).sum() > COUNT / 2


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
