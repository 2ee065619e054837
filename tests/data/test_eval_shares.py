"""Shares of an evaluation for modules that know nothing of fillers: every sample once, and no share is empty."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.sampler import Split, UnpaddedEvalSampler


def shares(count: int, batch: int, world: int, shuffled: bool = False) -> list[list[np.ndarray]]:
    split = Split(2 * count, 1, count, shuffled)
    return [list(UnpaddedEvalSampler(split, batch=batch, rank=rank, world=world)) for rank in range(world)]


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 100), st.integers(1, 8), st.booleans())
def test_every_sample_comes_once_and_ranks_have_the_same_number_of_batches(count, batch, world, shuffled):
    if count < world:
        with pytest.raises(ValueError, match="cannot be shared"):
            shares(count, batch, world)
        return
    found = shares(count, batch, world, shuffled)
    assert len({len(own) for own in found}) == 1
    assert min(len(part) for own in found for part in own) > 0
    every = np.concatenate([part for own in found for part in own])
    assert sorted(every) == sorted(Split(2 * count, 1, count, shuffled).indices(np.arange(count)))
    for step in zip(*found, strict=True):
        sizes = [len(part) for part in step]
        assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(st.integers(8, 300), st.integers(1, 100), st.integers(2, 8))
def test_global_batches_are_those_of_one_process_but_for_a_remainder_that_is_too_small(count, batch, world):
    one = [list(part) for (part,) in zip(*shares(count, max(batch, world), 1), strict=True)]
    several = [sorted(np.concatenate(step)) for step in zip(*shares(count, batch, world), strict=True)]
    if len(one) > 1 and len(one[-1]) < world:
        one[-2:] = [one[-2] + one[-1]]
    assert several == one
