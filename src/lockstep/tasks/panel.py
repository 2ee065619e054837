"""Panels of the report about the test set: what they are computed from, and what they show. Free of HTML."""

# B batch · N sample

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

EXACT = torch.float32 if torch.backends.mps.is_available() else torch.float64  # MPS has no float64
Point = tuple[float, float]


@dataclass(frozen=True)
class Table:
    """Sorted by a click on a column. `rows` holds texts and numbers; a fraction of samples, such as an accuracy, is a `Share`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""


@dataclass(frozen=True)
class Share:
    """`right` of `count`, shown as a percentage with its 95% interval."""

    right: int
    count: int

    @property
    def value(self) -> float:
        return self.right / self.count if self.count else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.right, self.count)


@dataclass(frozen=True)
class Matrix:
    """Counts of what each row was taken for; the diagonal is right."""

    title: str
    names: Sequence[str]
    values: Sequence[Sequence[int]]
    note: str = ""


@dataclass(frozen=True)
class Lines:
    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[Point]]
    note: str = ""


@dataclass(frozen=True)
class Points:
    """A scatter plot; `diagonal` draws the line of equal values."""

    title: str
    x: str
    y: str
    points: Sequence[Point]
    diagonal: bool = False
    note: str = ""


@dataclass(frozen=True)
class Bars:
    """A histogram: the edges of the bins, one more than there are counts."""

    title: str
    x: str
    y: str
    edges: Sequence[float]
    counts: Sequence[float]
    note: str = ""


@dataclass(frozen=True)
class Mask:
    """A class for each pixel, drawn over the sample's image. Pixels that are `ignored` stay clear."""

    classes_HW: Any
    ignored: int = -1


@dataclass(frozen=True)
class Tokens:
    """Pieces of text, each with a number that colours it."""

    pieces: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Sample:
    """`facts`: texts, numbers, a Mask or Tokens by name. `image_CHW`: bytes, or None."""

    index: int | None
    facts: Mapping[str, Any]
    image_CHW: Any = None


@dataclass(frozen=True)
class Gallery:
    title: str
    samples: Sequence[Sample]
    note: str = ""


Content = Table | Matrix | Lines | Points | Bars | Gallery


class Panel(Metric):
    """A panel about the test set. Subclass it: declare sums with `add_state` as for any torchmetrics Metric, and torchmetrics
    adds them up over processes, so every sample counts exactly once."""

    full_state_update = False

    def update(self, output: Any, batch: Mapping[str, Any], loss_B: Tensor) -> None:
        """Called with real samples only."""
        raise NotImplementedError

    def contents(self) -> Sequence[Content]:
        """What the report shows, from the states of all processes."""
        raise NotImplementedError

    def compute(self) -> None:
        """Unused, and required by torchmetrics."""


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95% interval of a fraction (Wilson, "Probable Inference", 1927); (0, 1) of no samples."""
    if not count:
        return 0.0, 1.0
    z, p = 1.959963984540054, right / count
    middle, scale = p + z * z / (2 * count), 1 + z * z / count
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def largest(count: int, key_N: Tensor, index_N: Tensor, *values: Tensor) -> list[Tensor]:
    """The rows with the largest keys, largest first; the smaller index first where keys are equal. NaN is the largest."""
    by_index_N = index_N.argsort(stable=True)
    order = by_index_N[key_N[by_index_N].argsort(descending=True, stable=True)][:count]
    return [value[order] for value in (key_N, index_N, *values)]


class Worst(Panel):
    """The samples with the largest losses, which the engine then describes."""

    loss_W: Tensor
    index_W: Tensor

    def __init__(self, count: int = 24) -> None:
        super().__init__()
        self.count = count
        self.add_state("loss_W", torch.full((count,), -math.inf, dtype=torch.float32), dist_reduce_fx=None)
        self.add_state("index_W", torch.full((count,), -1), dist_reduce_fx=None)

    def update(self, output: Any, batch: Mapping[str, Any], loss_B: Tensor) -> None:
        loss_N = torch.cat([self.loss_W, loss_B.detach().float()])
        index_N = torch.cat([self.index_W, batch["index"]])
        self.loss_W, self.index_W = largest(self.count, loss_N, index_N)

    def found(self) -> list[tuple[int, float]]:
        """Index and loss, the worst first."""
        loss_W, index_W = largest(self.count, self.loss_W.flatten(), self.index_W.flatten())
        return [(i, loss) for i, loss in zip(index_W.tolist(), loss_W.tolist(), strict=True) if i >= 0]
