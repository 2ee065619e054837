"""Holds out a fixed part of every class; it does not depend on `seed`. Free of torch."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lockstep.data.sampler import SPLIT_SEED, permute
from lockstep.data.samples import Indices

PARTS = ("train", "val", "test")


def held_out(strata: NDArray[np.int64], fraction: float) -> Indices:
    """Indices of a `fraction` of each stratum: at least one sample, never all."""
    order = np.argsort(strata, kind="stable")
    ends = np.flatnonzero(np.diff(strata[order])) + 1
    chosen = []
    for members in np.split(order, ends):
        count = min(max(1, round(len(members) * fraction)), len(members) - 1)
        if count > 0:
            chosen.append(members[permute(np.arange(count), len(members), SPLIT_SEED, int(strata[members[0]]))])
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)


def taken_from_train(*, test: float, val: float, folds: int | None) -> dict[str, float]:
    """The share of each part that is taken from train if the data lacks it. With `folds`, the engine divides train for validation."""
    return {"test": test} if folds else {"test": test, "val": val}


def divided(part_N: NDArray[np.str_], strata_N: NDArray[np.int64], fractions: Mapping[str, float]) -> NDArray[np.str_]:
    """The part of each sample. Parts in `fractions` that `part_N` lacks are taken from its train part."""
    part_N = part_N.copy()
    for name, fraction in fractions.items():
        if not (part_N == name).any():
            train = np.flatnonzero(part_N == "train")
            part_N[train[held_out(strata_N[train], fraction)]] = name
    return part_N
