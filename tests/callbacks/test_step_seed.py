import random

import numpy as np
import torch

from lockstep.callbacks.step_seed import seed_generators, seed_host


def test_what_a_step_draws_depends_on_its_seed_alone():
    def draw(seed: int) -> tuple[float, float, float]:
        seed_generators(seed, "cpu")
        seed_host(seed)
        return random.random(), np.random.rand(), torch.rand(1).item()

    first = draw(2**63 - 1)
    assert draw(7) != first
    assert draw(2**63 - 1) == first
