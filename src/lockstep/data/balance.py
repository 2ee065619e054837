"""Balanced sampling: every class equally often, as arithmetic over (seed, epoch, place)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.data.sampler import Split, permute
from lockstep.data.samples import CLASSES, Indices, classes_of
from lockstep.errors import UserError

ROUND = 2**40  # apart: the orders of one class from those of another, and from those of epochs


@dataclass(frozen=True)
class Balanced(Split):
    """A split whose epochs take every class equally often, and the samples of a class in turn."""

    members: tuple[Indices, ...] = ()  # positions in the split, by class

    def ordered(self, places: Indices, seed: int, epoch: int) -> Indices:
        place_N = permute(places, self.count, seed, epoch)
        before = epoch * self.count  # the turns go on from epoch to epoch
        turn_N, class_N = np.divmod(place_N + before, len(self.members))
        position_N = np.empty_like(place_N)
        for number, members in enumerate(self.members):
            own = np.flatnonzero(class_N == number)
            round_N, within_N = np.divmod(turn_N[own], len(members))
            for each in np.unique(round_N):
                of_round = own[round_N == each]
                order = permute(within_N[round_N == each], len(members), seed, (number + 1) * ROUND + int(each))
                position_N[of_round] = members[order]
        return self.indices(position_N)


def balanced(split: Split, part: Any, unit: str) -> Balanced:
    """Raises UserError: the classes of the samples are not known, or there is only one."""
    class_N = classes_of(part)
    if class_N is None:
        raise UserError(
            f"data.balance=true needs the classes of the training {unit} as one array: `target` of Arrays, or an attribute {' or '.join(CLASSES)} "
            "of your samples. This data has none; leave it out."
        )
    own = class_N[split.indices(np.arange(split.count))]
    members = tuple(np.flatnonzero(own == number) for number in np.unique(own))
    if len(members) < 2:
        raise UserError(f"data.balance=true has no effect: all training {unit} have one class. Leave it out.")
    return Balanced(split.total, split.first, split.count, split.shuffled, members)
