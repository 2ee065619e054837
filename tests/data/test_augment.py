"""Augmentation is a function of (seed, epoch, sample): of nothing else, and of each of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import functional as tv

from lockstep.data import Images, augment, sampler
from lockstep.data.augment import Augment, random_bits
from lockstep.errors import UserError


def images(count: int = 64, channels: int = 3, height: int = 9, width: int = 12) -> torch.Tensor:
    shape = (count, channels, height, width)
    return torch.from_numpy(np.random.default_rng(0).integers(1, 256, shape).astype(np.uint8))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_the_device_mixes_bits_as_the_sampler_does(values):
    unsigned = np.array(values, np.uint64)
    mixed = augment.mix(torch.from_numpy(unsigned.view(np.int64)))
    assert mixed.numpy().view(np.uint64).tolist() == sampler.mix(unsigned).tolist()


@settings(max_examples=20, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_an_image_is_changed_alike_in_whatever_batch_it_comes(data, seed, epoch):
    change, image_BCHW, index_B = Augment(shift=3, flip=True), images(), torch.arange(1000, 1064)
    whole = change(image_BCHW, index_B, seed, epoch)
    order = torch.tensor(data.draw(st.permutations(range(64)))[: data.draw(st.integers(1, 64))])
    assert torch.equal(change(image_BCHW[order], index_B[order], seed, epoch), whole[order])


def test_seed_epoch_and_sample_each_make_a_difference():
    index_B = torch.arange(10_000)
    of = {place: random_bits(index_B, *place) for place in ((0, 0), (0, 1), (1, 0))}
    assert len(set(torch.cat(list(of.values())).tolist())) == 30_000
    assert torch.equal(of[0, 0], random_bits(index_B, 0, 0))


def test_shifts_and_mirror_images_are_equally_frequent():
    change, count, s = Augment(shift=2, flip=True), 25_000, 2
    marked = torch.zeros(count, 1, 7, 8, dtype=torch.uint8)
    marked[:, 0, 3, 3] = 1  # in the mirror image, in column 4
    _, _, rows, columns = change(marked, torch.arange(count), 0, 5).nonzero(as_tuple=True)
    assert len(rows) == count
    down = torch.bincount(rows - 3 + s, minlength=2 * s + 1)
    assert len(down) == 5
    assert (down - count / 5).abs().max() < 0.05 * count / 5
    right = torch.bincount(columns - 3 + s, minlength=6)  # from -2 to +2, or that to the right of it
    assert len(right) == 6
    assert abs(int(right[0]) - count / 10) < 0.05 * count
    assert abs(int(right[5]) - count / 10) < 0.05 * count


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 28, 28), (3, 9, 12)])
def test_each_image_is_a_crop_of_the_padded_one_or_of_its_mirror_image(channels, height, width):
    s, image_BCHW = 3, images(40, channels, height, width)
    made = Augment(shift=s, flip=True)(image_BCHW, torch.arange(40), 1, 0)
    kinds = set()
    for image, result in zip(image_BCHW, made, strict=True):
        padded = tv.pad(image, [s, s, s, s])
        crops = {
            (top, left, mirrored): tv.hflip(crop) if mirrored else crop
            for top in range(2 * s + 1)
            for left in range(2 * s + 1)
            for mirrored in (False, True)
            for crop in [tv.crop(padded, top, left, height, width)]
        }
        fitting = [place for place, crop in crops.items() if torch.equal(crop, result)]
        assert len(fitting) == 1
        kinds.add(fitting[0])
    assert len(kinds) > 20


def test_without_a_shift_images_are_mirrored_only():
    image_BCHW = images()
    made = Augment(shift=0, flip=True)(image_BCHW, torch.arange(64), 0, 0)
    same = [torch.equal(a, b) for a, b in zip(image_BCHW, made, strict=True)]
    mirrored = [torch.equal(a.flip(-1), b) for a, b in zip(image_BCHW, made, strict=True)]
    assert all(a != b for a, b in zip(same, mirrored, strict=True))
    assert 16 < sum(same) < 48


def test_a_shift_alone_mirrors_nothing():
    image_BCHW = torch.zeros(500, 1, 5, 6, dtype=torch.uint8)
    image_BCHW[..., 2] = 1
    image_BCHW[..., 3] = 2
    made = Augment(shift=1, flip=False)(image_BCHW, torch.arange(500), 0, 0)
    (ones, twos) = ((made[:, 0, 2] == value).nonzero()[:, 1] for value in (1, 2))
    assert torch.equal(ones + 1, twos)


def with_masks(**more: torch.Tensor) -> dict:
    """Each pixel of a mask says whether the image is bright there."""
    image_BCHW = images(64, 3, 8, 8)
    return {"input": image_BCHW, "target": (image_BCHW[:, 0] > 127).long(), "index": torch.arange(64), **more}


@pytest.mark.parametrize("size", [8, 4, 20])
def test_masks_stay_upon_their_images(size):
    data = Images(image_size=size, mean=[0, 0, 0], std=[1, 1, 1], random_flip=True)
    before = with_masks(shape=torch.arange(64))
    flipped = data.augment(before, seed=0, epoch=0)
    assert torch.equal(flipped["target"], flipped["input"][:, 0] > 127)
    assert 16 < sum(not torch.equal(a, b) for a, b in zip(before["target"], flipped["target"], strict=True)) < 48
    done = data.preprocess(flipped)
    assert torch.equal(done["shape"], before["shape"])
    assert (done["target"].dtype, done["target"].shape) == (torch.int64, (64, size, size))
    if size == 8:
        assert torch.equal(done["target"], done["input"][:, 0] * 255 > 127.5)


@pytest.mark.parametrize(("options", "more", "told"), [
    ({"random_shift": 1}, {}, r"data.random_shift cannot move `target` of shape \(64, 8, 8\)"),
    ({"random_flip": True}, {"boxes": torch.zeros(64, 2, 4)}, r"data.random_flip cannot move `boxes` of shape \(64, 2, 4\)"),
])  # fmt: skip
def test_what_cannot_follow_the_images_is_refused(options, more, told):
    with pytest.raises(UserError, match=told):
        Images(image_size=8, **options).augment(with_masks(**more), seed=0, epoch=0)
