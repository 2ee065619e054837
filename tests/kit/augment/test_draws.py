"""Random numbers are a function of (seed, epoch, sample, copy, operation): of nothing else, and of each of them."""

import numpy as np
import pytest
import torch

from lockstep.kit.augment import Draws, RandomErasing
from lockstep.kit.augment.transforms import beta


def numbers(count: int = 10_000, name: str = "augment.x", seed: int = 0, epoch: int = 0, repeats: int = 1) -> Draws:
    return Draws(name, np.arange(count), seed=seed, epoch=epoch, repeats=repeats)


def test_seed_epoch_place_name_and_number_each_make_a_difference():
    others = [{"seed": 1}, {"epoch": 1}, {"name": "augment.y"}, {"name": "augment.xx"}]
    of = [numbers(), *(numbers(**other) for other in others)]
    bits = np.concatenate([each.bits(4).flatten() for each in of])
    different = len(set(bits.tolist()))
    assert different == 5 * 40_000
    assert np.array_equal(numbers().bits(4), numbers().bits(4))
    # one draw of several numbers is several draws
    one, several = numbers(), numbers()
    assert np.array_equal(np.stack([one.bits(), one.bits(), one.bits()], 1), several.bits(3))
    assert not np.array_equal(one.bits(), numbers().bits())
    assert np.array_equal(one.noise(7, 20), one.bits(3)[7].view(np.uint8)[:20])


@pytest.mark.parametrize("vary", ["sample", "epoch", "number"])
def test_numbers_are_uniform_and_independent(vary):
    if vary == "sample":
        u = numbers(100_000).uniform()
    elif vary == "epoch":
        u = np.concatenate([numbers(100, epoch=epoch).uniform() for epoch in range(1000)])
    else:
        u = numbers(1).uniform(shape=(100_000,))[0]
    assert float(u.min()) >= 0 and float(u.max()) < 1
    counts = np.histogram(u, 100, (0, 1))[0]
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 99 + 4 * np.sqrt(2 * 99)
    neighbours = np.corrcoef(u[:-1], u[1:])[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(len(u))


def test_whole_numbers_chances_ranges_and_partners():
    d = numbers(60_000)
    counts = np.bincount(d.below(6))
    assert len(counts) == 6
    assert np.abs(counts - 10_000).max() < 400
    bound_B = np.arange(60_000) % 7 + 1
    below = d.below(bound_B)
    assert (below < bound_B).all() and (below >= 0).all() and below.max() == 6
    assert abs(d.chance(0.3).mean() - 0.3) < 0.01
    assert not d.chance(0).any() and d.chance(1).all()
    u = d.uniform(-3, 5)
    assert -3 <= float(u.min()) < -2.9 and 4.9 < float(u.max()) <= 5
    # partners are neighbours of the same copy
    for repeats in (1, 2, 3):
        place_B, partner_B = np.arange(12 * repeats), numbers(12 * repeats, repeats=repeats).partner_B.numpy()
        assert np.array_equal(partner_B // repeats, place_B // repeats ^ 1)
        assert np.array_equal(partner_B % repeats, place_B % repeats)


@pytest.mark.parametrize("alpha", [0.1, 0.8, 3.0])
def test_the_weights_of_mixup_have_a_beta_distribution(alpha):
    made = np.sort(beta(numbers(200_000), alpha).astype(np.float64))
    drawn = np.sort(np.random.default_rng(0).beta(alpha, alpha, 200_000))
    assert made[0] >= 0 and made[-1] <= 1
    grid = np.linspace(0.001, 0.999, 999)
    distance = np.abs(np.searchsorted(made, grid) - np.searchsorted(drawn, grid)).max() / 200_000
    assert distance < 0.006  # Kolmogorov and Smirnov: 0.0061 in one of a thousand
    assert made.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.01)


@pytest.mark.parametrize("size", [(32, 32), (20, 37)])
def test_boxes_are_distributed_as_torchvisions(size):
    from torchvision.transforms import v2

    blank, count = [torch.zeros(3, *size)], 4000
    cases = {
        v2.RandomErasing(p=1): RandomErasing(probability=1, scale=(0.02, 0.33)).boxes(*size, numbers(20_000)),
    }
    for theirs, ours in cases.items():
        found = [theirs.make_params(blank) for _ in range(count)]
        keys = ("top", "left", "height", "width") if "top" in found[0] else ("i", "j", "h", "w")
        for key, values_B in zip(keys, ours.T, strict=True):
            expected = np.sort([params[key] for params in found])
            made = np.sort(values_B)
            grid = np.arange(-1, 40) + 0.5
            distance = np.abs(np.searchsorted(made, grid) / 20_000 - np.searchsorted(expected, grid) / count).max()
            assert distance < 0.035, key
        top, left, height, width = ours.T
        assert (top >= 0).all() and (top + height <= size[0]).all()
        assert (left >= 0).all() and (left + width <= size[1]).all()
