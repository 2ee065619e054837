"""A generator that nothing leads to, for tests/packages/kept.py."""

import numpy as np

RNG = np.random.default_rng()


def draw():
    return RNG.normal()
