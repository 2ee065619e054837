"""Each operation gives what torchvision's gives for one image and the same parameters: odd and non-square sizes, grey and colour.

Bytes may differ by one level, where float32 arithmetic of another order rounds to another side.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import v2 as tv
from torchvision.transforms.v2 import functional as F

from lockstep.augment import (
    ColorJitter,
    Cutmix,
    Flip,
    RandAugment,
    RandomErasing,
    RandomResizedCrop,
    Rotate,
    Shift,
    TrivialAugment,
    kernels,
)
from lockstep.augment.draws import Draws
from lockstep.augment.policies import BINS, BLENDS, KNOWN, MOVING
from lockstep.data.preprocess import resize_nearest

SIZES = [(1, 28, 28), (3, 21, 34), (3, 33, 20)]
COUNT = 24


def images(channels: int, height: int, width: int, count: int = COUNT) -> Tensor:
    """Smooth shapes, noise, and the extremes."""
    random = np.random.default_rng(0)
    noise = torch.from_numpy(random.integers(0, 256, (count, channels, height, width)).astype(np.uint8))
    coarse = torch.from_numpy(random.integers(0, 256, (count, channels, 4, 4)).astype(np.float32))
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear").round().to(torch.uint8)
    found = torch.where(torch.arange(count)[:, None, None, None] % 2 == 0, noise, smooth)
    found[-1], found[-2] = 0, 255
    found[-3] = found[-3] // 4 + 90  # a narrow range
    return found


def draws(count: int = COUNT, name: str = "augment.x") -> Draws:
    return Draws(name, torch.arange(count) + 1000, seed=3, epoch=2)


def assert_close(made: Tensor, expected: Tensor, *, levels: int = 1, but: float = 0.0) -> None:
    """At most `levels` apart, except for a share of the pixels."""
    assert (made.dtype, made.shape) == (expected.dtype, expected.shape)
    apart = (made.int() - expected.int()).abs() > levels
    assert apart.float().mean() <= but, f"{apart.float().mean():.4f} of the pixels differ by more than {levels}"


def assert_moved(made: Tensor, expected: Tensor, matrix_23: Tensor) -> None:
    """Equal, except where a pixel comes from the middle between two, and rounding decides which one is nearest."""
    places = torch.stack(kernels.sources(matrix_23[None], *made.shape[-2:]))[:, 0]
    between_HW = ((places - places.floor() - 0.5).abs() < 1e-3).any(0)
    assert torch.equal(made.where(~between_HW, 0), expected.where(~between_HW, 0))


@pytest.mark.parametrize("size", SIZES)
def test_shifts(size):
    operation, image = Shift(pixels=3), images(*size)
    made = operation({"input": image}, draws())["input"]
    for each, result, (down, right) in zip(image, made, operation.plan(*size[1:], draws()).tolist(), strict=True):
        padded = F.pad(each, [3, 3, 3, 3])
        assert torch.equal(F.crop(padded, 3 - down, 3 - right, *size[1:]), result)


@pytest.mark.parametrize("size", SIZES)
def test_flips(size):
    image = images(*size)
    operation = Flip(horizontal=0.5, vertical=0.5)
    plan = operation.plan(*size[1:], draws())
    made = operation({"input": image}, draws())["input"]
    for place in range(COUNT):
        expected = F.horizontal_flip(image[place]) if plan[-1][place] else image[place]
        expected = F.vertical_flip(expected) if plan[-2][place] else expected
        assert torch.equal(made[place], expected)


@pytest.mark.parametrize("out", [13, 24, 57])
@pytest.mark.parametrize("size", SIZES)
def test_crops_are_resized_with_antialiasing(size, out):
    operation, image = RandomResizedCrop(scale=(0.05, 1.0), ratio=(0.4, 2.5), image_size=out), images(*size)
    made = operation({"input": image}, draws())["input"]
    boxes = torch.stack(operation.plan(*size[1:], draws()), 1)
    exact = kernels.crop_resized(image, boxes.unbind(1), (out, out))
    mask = kernels.crop_nearest(image, boxes.unbind(1), (out, out))
    for place, box in enumerate(boxes.tolist()):
        as_float = F.resized_crop(image[place].float(), *box, [out, out], antialias=True)
        torch.testing.assert_close(exact[place], as_float, atol=1e-3, rtol=0)
        assert_close(made[place], F.resized_crop(image[place], *box, [out, out], antialias=True))
        assert torch.equal(
            mask[place], resize_nearest(F.crop(image[place], *box), out)
        )  # test_transforms.py compares it


@pytest.mark.parametrize("size", SIZES)
def test_rotations(size):
    image = images(*size)
    degrees_B = torch.linspace(-180, 180, COUNT)
    matrix = kernels.rotation(degrees_B * (math.pi / 180))
    whole, bilinear = kernels.affine_nearest(image, matrix, 0), kernels.affine_bilinear(image, matrix, 0)
    for place, angle in enumerate(degrees_B.tolist()):
        smooth = F.rotate(image[place].float(), angle, InterpolationMode.BILINEAR)
        torch.testing.assert_close(bilinear[place], smooth, atol=0.02, rtol=0)
        assert_moved(whole[place], F.rotate(image[place], angle), matrix[place])
    made = Rotate(degrees=40, interpolation="nearest", fill=7)({"input": image}, draws())["input"]
    matrix = Rotate(degrees=40).plan(*size[1:], draws())
    for place, angle in enumerate(draws().uniform(-40, 40).tolist()):
        assert_moved(made[place], F.rotate(image[place], angle, fill=7), matrix[place])


JITTER = {
    "brightness": (kernels.brightness, F.adjust_brightness),
    "contrast": (kernels.contrast, F.adjust_contrast),
    "saturation": (kernels.saturation, F.adjust_saturation),
    "sharpness": (kernels.sharpness, F.adjust_sharpness),
    "hue": (kernels.hue, F.adjust_hue),
}


@pytest.mark.parametrize("name", JITTER)
@pytest.mark.parametrize("size", SIZES)
def test_changes_of_colour(size, name):
    ours, theirs = JITTER[name]
    image = images(*size)
    factor_B = torch.linspace(-0.5, 0.5, COUNT) if name == "hue" else torch.linspace(0, 2, COUNT)
    made = ours(image.float(), factor_B).to(torch.uint8)
    for place, factor in enumerate(factor_B.tolist()):
        assert_close(made[place], theirs(image[place], factor))


@pytest.mark.parametrize("size", SIZES)
def test_colour_jitter_changes_in_its_order(size):
    strengths = {"brightness": 0.4, "contrast": 0.3, "saturation": 0.5, "hue": 0.1}
    image, numbers = images(*size), draws()
    made = ColorJitter(**strengths)({"input": image}, draws())["input"]
    factors = [numbers.uniform(1 - strengths[name], 1 + strengths[name]) for name in list(strengths)[:3]]
    factors.append(numbers.uniform(-0.1, 0.1))
    for place, expected in enumerate(image):
        for name, factor_B in zip(strengths, factors, strict=True):
            expected = JITTER[name][1](expected, float(factor_B[place]))
        # a difference of one level in the first change grows in the next ones, most of all in the hue of grey pixels
        assert_close(made[place], expected, levels=2, but=0.02)


def name_of(operation: str) -> str:
    return {"autocontrast": "AutoContrast"}.get(operation) or operation.title().replace("_", "")


@pytest.mark.parametrize("operation", KNOWN)
@pytest.mark.parametrize(("policy", "size"), [*((TrivialAugment, size) for size in SIZES), (RandAugment, SIZES[1])])
def test_each_operation_of_a_policy_at_each_magnitude(policy, size, operation):
    """The same tables of magnitudes as torchvision's, and the same image from each."""
    theirs = {TrivialAugment: tv.TrivialAugmentWide, RandAugment: tv.RandAugment}[policy]()
    if operation == "invert":
        magnitudes = None
    else:
        of_theirs = theirs._AUGMENTATION_SPACE[name_of(operation)]
        magnitudes = of_theirs[0](BINS, *size[1:])
        assert of_theirs[1] == (operation in (*MOVING, *BLENDS))
    image = images(*size, count=2 * BINS)

    class Chosen(policy):
        def bin_B(self, draws):
            return draws.place_B // 2

    once = {"count": 1} if policy is RandAugment else {}
    chosen = Chosen(operations=[operation], **once)
    made, (matrix, _) = chosen({"input": image}, draws(2 * BINS))["input"], chosen.plan(*size[1:], draws(2 * BINS))
    signs = draws(2 * BINS)
    signs.below(1)
    sign_B = 1 - 2 * signs.below(2)
    for place in range(2 * BINS):
        magnitude = 0.0 if magnitudes is None else float(magnitudes[place // 2])
        if operation in (*MOVING, *BLENDS):
            magnitude *= int(sign_B[place])
        expected = theirs._apply_image_or_video_transform(
            image[place], name_of(operation), magnitude, InterpolationMode.NEAREST, {}
        )
        if operation in MOVING:
            assert_moved(made[place], expected, matrix[place])
        else:
            assert_close(made[place], expected)


def test_a_policy_changes_each_image_by_its_own_operation_and_no_other():
    image = images(3, 30, 31, count=200)
    operation = TrivialAugment()
    found = operation.magnitudes(draws(200), 30, 31)
    chosen_B = draws(200).below(len(operation.operations))
    made = operation({"input": image}, draws(200))["input"]
    for place, name in enumerate(operation.operations):
        rows = (chosen_B == place).nonzero()[:, 0]
        assert len(rows) > 3
        only = {name: found[name][rows]}
        moved = image[rows]
        if name in MOVING:
            moved = kernels.affine_nearest(moved, kernels.matrix(only, 30, 31), 0)
        assert torch.equal(made[rows], kernels.recolored(moved, only)), name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fill", [0, 93, "noise"])
def test_erased_boxes(size, fill):
    operation, image = RandomErasing(probability=0.8, scale=(0.02, 0.4), fill=fill), images(*size)
    made = operation({"input": image}, draws())["input"]
    erased = 0
    for place, (top, left, height, width) in enumerate(torch.stack(operation.boxes(*size[1:], draws()), 1).tolist()):
        inside = made[place][:, top : top + height, left : left + width]
        value = inside if fill == "noise" else torch.full_like(inside, fill)
        assert torch.equal(made[place], F.erase(image[place], top, left, height, width, value))
        erased += height > 0
    assert 10 < erased < COUNT


@pytest.mark.parametrize("size", SIZES)
def test_cutmix_pastes_the_box_of_the_partner(size):
    image = images(*size)
    batch = {"input": image, "index": torch.arange(COUNT)}
    operation = Cutmix()
    made = operation(batch, draws())
    for place, (top, left, height, width) in enumerate(torch.stack(operation.boxes(*size[1:], draws()), 1).tolist()):
        expected = image[place].clone()
        box = (slice(None), slice(top, top + height), slice(left, left + width))
        expected[box] = image[place ^ 1][box]
        assert torch.equal(made["input"][place], expected)
        share = 1 - height * width / (size[1] * size[2])
        assert float(made["share"][place]) == pytest.approx(share)
