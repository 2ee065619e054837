"""Panels of the report about the test set: contents, base class, and the panels that tasks share. Free of HTML."""

# B batch · N sample · K class · L label · H W pixel · T target, or token of a sequence

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lockstep import UserError

Point = tuple[float, float]


@dataclass(frozen=True)
class Table:
    """A table, sortable by column. `rows`: text, numbers, or a `Share` for a fraction of samples such as accuracy."""

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
    """Counts of the predictions (columns) for each target (row). The diagonal counts correct predictions."""

    title: str
    names: Sequence[str]
    values: Sequence[Sequence[int]]
    note: str = ""


@dataclass(frozen=True)
class Lines:
    """Curves of points (x, y), for the test set or for one sample. A point that is not finite leaves a gap."""

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[Point]]
    note: str = ""

    def __post_init__(self) -> None:
        """Converts arrays and tensors to plain numbers, because a chart is drawn long after the batch."""
        vars(self)["series"] = {n: [(float(x), float(y)) for x, y in points] for n, points in self.series.items()}


@dataclass(frozen=True)
class Points:
    """A scatter plot. `diagonal` draws the line x = y."""

    title: str
    x: str
    y: str
    points: Sequence[Point]
    diagonal: bool = False
    note: str = ""


@dataclass(frozen=True)
class Bars:
    """A histogram. `edges` of the bins has one more element than `counts`."""

    title: str
    x: str
    y: str
    edges: Sequence[float]
    counts: Sequence[float]
    note: str = ""


@dataclass(frozen=True)
class Mask:
    """A class for each pixel, drawn over the image with a legend of `names`. Class 0 and `ignored` are transparent."""

    classes_HW: Any
    ignored: int = -1
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Picture:
    """An image next to the sample's image, with 1 or 3 channels: uint8, or floats from 0 to 1, converted to uint8."""

    image_CHW: Any

    def __post_init__(self) -> None:
        image = self.image_CHW
        if isinstance(image, Tensor):
            image = (image.float() if image.is_floating_point() else image).detach().cpu()  # NumPy has no bfloat16
        image_CHW = np.asarray(image)
        is_image = image_CHW.ndim == 3 and len(image_CHW) in (1, 3) and image_CHW.size
        is_float = is_image and image_CHW.dtype.kind == "f" and 0 <= image_CHW.min() <= image_CHW.max() <= 1
        if not is_image or not (image_CHW.dtype == np.uint8 or is_float):
            raise UserError(
                f"Picture: expected (channels, height, width) with 1 or 3 channels, as uint8 or floats from 0 to 1, not {image_CHW.dtype} {image_CHW.shape}"
            )
        if image_CHW.dtype != np.uint8:
            image_CHW = (255 * image_CHW).round().astype(np.uint8)
        vars(self)["image_CHW"] = image_CHW


@dataclass(frozen=True)
class Tokens:
    """Pieces of text, each coloured by a number."""

    pieces: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Sample:
    """`facts` by name: text, numbers, a Mask, a Picture, Lines or Tokens. `image_CHW`: uint8 or None."""

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
    """A panel about the test set. Subclass it and declare sums with `add_state`, as in any torchmetrics Metric.

    torchmetrics adds the sums up over processes, so each sample counts exactly once.
    """

    full_state_update = False

    def update(self, output: Any, batch: Mapping[str, Any], loss_B: Tensor) -> None:
        """Called with real samples only."""
        raise NotImplementedError

    def contents(self) -> Sequence[Content]:
        """The contents that the report shows, computed from the states of all processes."""
        raise NotImplementedError

    def compute(self) -> None:
        """Unused, but required by torchmetrics."""


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95% interval of a fraction (Wilson, "Probable Inference", 1927); (0, 1) without samples."""
    if not count:
        return 0.0, 1.0
    z, p = 1.959963984540054, right / count
    middle, scale = p + z * z / (2 * count), 1 + z * z / count
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def largest(count: int, key_N: Tensor, index_N: Tensor, *values: Tensor) -> list[Tensor]:
    """The rows with the largest keys, largest first. Ties are ordered by index, and NaN counts as the largest."""
    by_index_N = index_N.argsort(stable=True)
    order = by_index_N[key_N[by_index_N].argsort(descending=True, stable=True)][:count]
    return [value[order] for value in (key_N, index_N, *values)]


HASH, MODULUS = 2654435761, 2**32  # Knuth's multiplicative hash: spreads indices evenly, no collisions below 2^32


class Kept(Panel):
    """Values of the highest-loss samples, or of a random subset, the same in every evaluation, world and order."""

    key_N: Tensor
    index_N: Tensor
    value_N: Tensor

    def __init__(self, count: int, *shape: int, by_loss: bool = False) -> None:
        super().__init__()
        self.kept, self.by_loss = count, by_loss
        self.add_state("key_N", torch.full((count,), -math.inf), dist_reduce_fx=None)
        self.add_state("index_N", torch.full((count,), -1), dist_reduce_fx=None)
        self.add_state("value_N", torch.zeros(count, *shape), dist_reduce_fx=None)

    def value(self, output: Any, batch: Mapping[str, Any], loss_B: Tensor) -> Tensor:
        return loss_B.detach().float()

    def update(self, output: Any, batch: Mapping[str, Any], loss_B: Tensor) -> None:
        index_B = batch["index"]
        key_B = loss_B.detach().float() if self.by_loss else -(index_B * HASH % MODULUS).float()
        pairs = ((self.key_N, key_B), (self.index_N, index_B), (self.value_N, self.value(output, batch, loss_B)))
        self.key_N, self.index_N, self.value_N = largest(self.kept, *(torch.cat(pair) for pair in pairs))

    def found(self) -> list[tuple[int, Tensor]]:
        """Index and value, the largest key first."""
        values = self.value_N.flatten(end_dim=self.index_N.dim() - 1)  # of all processes
        _, index_N, value_N = largest(self.kept, self.key_N.flatten(), self.index_N.flatten(), values)
        return [(index, value) for index, value in zip(index_N.tolist(), value_N, strict=True) if index >= 0]


# --- Panels about classes: the confusion matrix, metrics by class or by label, calibration ---
#
# `inputs` is the task's `metric_inputs`: panels and metrics are computed from the same values.

Inputs = Callable[[Any, Mapping[str, Any]], tuple[Any, ...]]
BINS = 15  # of the calibration, as in Guo et al., "On Calibration of Modern Neural Networks", 2017
FEW = 30  # the largest number of classes for a readable matrix; above it, the most frequent confusions are listed
PAIRS = 20


class Confusion(Panel):
    """Counts of (target, prediction) pairs of K classes. Other targets do not count."""

    confusion_KK: Tensor
    columns: ClassVar[tuple[str, ...]] = ("count", "recall", "precision", "F1")

    def __init__(self, names: Sequence[str], inputs: Inputs, ignored: int = -1) -> None:
        super().__init__()
        self.inputs = inputs
        self.names, self.ignored = [str(name) for name in names], ignored
        size = len(self.names)
        self.add_state("confusion_KK", torch.zeros(size, size, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, output: Any, batch: Mapping[str, Any], loss_B: Tensor) -> None:
        size, (output, target) = len(self.names), self.inputs(output, batch)
        target, guess = target.flatten().long(), output[:, :size].argmax(1).flatten()
        # counted by weights 0 and 1, because boolean indexing would wait for the GPU
        is_valid = (target >= 0) & (target < size) & (target != self.ignored)
        index = target.clamp(0, size - 1) * size + guess
        self.confusion_KK.view(-1).index_add_(0, index, is_valid.long())

    def matrix(self) -> Iterator[Content]:
        values = self.confusion_KK.tolist()
        if len(values) <= FEW:
            yield Matrix("Confusion matrix", self.names, values, "Rows are targets, columns are predictions.")
            return
        wrong = self.confusion_KK.clone().fill_diagonal_(0).flatten()
        indices = [index for index in wrong.topk(PAIRS).indices.sort().values.tolist() if wrong[index]]
        pairs = sorted(((int(wrong[index]), *divmod(index, len(values))) for index in indices), reverse=True)
        rows = [(self.names[a], self.names[b], n, Share(n, sum(values[a]))) for n, a, b in pairs]
        yield Table("Most frequent confusions", ("target", "predicted as", "count", "fraction of the target"), rows)

    def of_class(self, right: int, target: int, guess: int) -> tuple[Any, ...]:
        return precision_and_recall(right, target, guess)

    def contents(self) -> Sequence[Content]:
        counts_KK = self.confusion_KK
        columns = (counts_KK.diagonal().tolist(), counts_KK.sum(1).tolist(), counts_KK.sum(0).tolist())
        rows = [(name, *self.of_class(*counts)) for name, *counts in zip(self.names, *columns, strict=True)]
        return [*self.matrix(), Table("Metrics by class", ("class", *self.columns), rows)]


def precision_and_recall(right: int, target: int, guess: int) -> tuple[Any, ...]:
    """The count, the recall, the precision, and their harmonic mean, F1."""
    return target, Share(right, target), Share(right, guess), ratio(2 * right, target + guess)


def ratio(part: int, whole: int) -> float:
    """NaN if `whole` is 0: a class that neither occurs nor is predicted has no score, and no mean includes it."""
    return part / whole if whole else math.nan


class ByPixel(Confusion):
    """For segmentation: counts pixels, and measures each class by its intersection over union."""

    columns = ("pixels", "IoU", "recall", "precision")

    def of_class(self, right: int, target: int, guess: int) -> tuple[Any, ...]:
        fraction = target / max(1, int(self.confusion_KK.sum()))
        return f"{fraction:.1%}", ratio(right, target + guess - right), ratio(right, target), ratio(right, guess)


class Calibration(Panel):
    """Whether predictions with probability 0.8 are correct 8 times out of 10. Bins: torchmetrics' CalibrationError."""

    bins_3B: Tensor

    def __init__(self, scores: Inputs) -> None:
        super().__init__()
        self.scores = scores  # probability_BK and target_B
        self.add_state("bins_3B", torch.zeros(3, BINS, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, output: Any, batch: Mapping[str, Any], loss_B: Tensor) -> None:
        probability_BK, target_B = self.scores(output, batch)
        probability_B, guess_B = probability_BK.max(1)
        right_B = guess_B == target_B
        edges = torch.linspace(0, 1, BINS + 1, dtype=probability_B.dtype).to(probability_B)
        index_B = (torch.bucketize(probability_B, edges, right=True) - 1).clamp(0, BINS - 1)
        values_3B = torch.stack([torch.ones_like(probability_B), probability_B, right_B.to(probability_B)])
        self.bins_3B.index_add_(1, index_B, values_3B.to(self.bins_3B.dtype))

    def contents(self) -> Sequence[Content]:
        count_B, probability_B, right_B = self.bins_3B.tolist()
        filled = [row for row in zip(count_B, probability_B, right_B, strict=True) if row[0]]
        error = sum(abs(p - r) for _, p, r in filled) / max(1.0, sum(count_B))
        line = [(p / n, r / n) for n, p, r in filled]
        series = {"perfect": [(0.0, 0.0), (1.0, 1.0)], "measured": line}
        x, note = "probability of the prediction", f"Expected calibration error {error:.4f}."
        edges = [index / BINS for index in range(BINS + 1)]
        bins = Bars("Predictions by probability", x, "samples", edges, count_B, "Samples per calibration bin.")
        return [Lines("Calibration", x, "fraction that is correct", series, note), bins]


LEVELS, LEVEL = 56, 0.5  # thresholds: bins of the probability's logit, from -14 to 14
SHOWN = 8  # maximum number of curves in a chart


class PrecisionRecall(Panel):
    """Precision over recall of each class against the rest. `scores`: probability_BK, and target_B or 0/1 target_BK."""

    counts_2KT: Tensor  # of samples outside of the class, and in the class

    def __init__(self, names: Sequence[str], scores: Inputs) -> None:
        super().__init__()
        self.names, self.scores = [str(name) for name in names], scores
        self.add_state("counts_2KT", torch.zeros(2, len(names), LEVELS, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, output: Any, batch: Mapping[str, Any], loss_B: Tensor) -> None:
        (probability_BK, target), size = self.scores(output, batch), len(self.names)
        level_BK = probability_BK[:, :size].float().logit(1e-6) / LEVEL + LEVELS / 2
        level_BK = level_BK.long().clamp(0, LEVELS - 1)
        class_K = torch.arange(size).to(level_BK)
        is_BK = target if target.dim() == 2 else target[:, None] == class_K
        index_N = ((is_BK.long() * size + class_K) * LEVELS + level_BK).flatten()
        self.counts_2KT.view(-1).index_add_(0, index_N, torch.ones_like(index_N))

    def contents(self) -> Sequence[Content]:
        right_KT, guess_KT = (x.cpu().flip(1).cumsum(1) for x in (self.counts_2KT[1], self.counts_2KT.sum(0)))
        recall_KT, precision_KT = right_KT / right_KT[:, -1:].clamp(min=1), right_KT / guess_KT.clamp(min=1)
        gain_KT = recall_KT.diff(dim=1, prepend=torch.zeros(len(recall_KT), 1))
        average_K = (gain_KT * precision_KT).sum(1)
        indices = sorted(right_KT[:, -1].nonzero().flatten().tolist(), key=average_K.tolist().__getitem__)
        curves: dict[str, list[Point]] = {}
        for index in indices[:SHOWN]:
            new_T = gain_KT[index] > 0
            points = torch.stack([recall_KT[index][new_T], precision_KT[index][new_T]], 1).tolist()
            curves[f"{self.names[index]} ({average_K[index]:.3f})"] = [(0.0, points[0][1]), *map(tuple, points)]
        note = f"Mean average precision {average_K[indices].mean():.4f}."
        note += f" The {SHOWN} with the lowest average precision are shown." if len(indices) > SHOWN else ""
        return [Lines("Precision and recall", "recall", "precision", curves, note)] if indices else []


class ByLabel(Panel):
    """For multilabel data: recall and precision of each label."""

    counts_3L: Tensor

    def __init__(self, names: Sequence[str], inputs: Inputs, threshold: float) -> None:
        super().__init__()
        self.inputs = inputs
        self.names, self.threshold = [str(name) for name in names], threshold
        self.add_state("counts_3L", torch.zeros(3, len(self.names), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, output: Any, batch: Mapping[str, Any], loss_B: Tensor) -> None:
        probability_BL, target_BL = self.inputs(output, batch)
        target_BL, guess_BL = target_BL.bool(), probability_BL > self.threshold
        self.counts_3L += torch.stack([x.sum(0) for x in (target_BL & guess_BL, target_BL, guess_BL)])

    def contents(self) -> Sequence[Content]:
        counts_L3 = self.counts_3L.T.tolist()
        rows = [(n, *precision_and_recall(*counts)) for n, counts in zip(self.names, counts_L3, strict=True)]
        note = f"A label is predicted if its probability is above {self.threshold:g}."
        return [Table("Metrics by label", ("label", "count", "recall", "precision", "F1"), rows, note)]
