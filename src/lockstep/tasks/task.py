"""The base class of tasks: loss and metrics. A task knows nothing about ranks, devices, strategies or checkpoints."""

# B batch

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchmetrics import Metric

from lockstep.errors import UserError
from lockstep.tasks.panel import Panel

Plain = str | int | float
RESERVED = ("index", "path", "row", "error")  # columns of a table of predictions that say what a row is about
AT_ONCE = 2**22  # numbers that are judged together


@dataclass(frozen=True)
class Targets:
    """What a task takes as targets. Whole numbers are from `least` on and stand for names, unless `most` is given."""

    what: str  # in words, of one sample
    dims: int | None  # of one sample's; None: any
    whole: bool = True
    least: float = 0
    most: float | None = None
    ignored: int | None = None  # a number that does not count
    hint: str = ""

    def wrong(self, target_N: NDArray[Any], names: int) -> tuple[int, str] | None:
        """The place of the first sample whose target is something else, and what it is."""
        most = names - 1 if self.most is None else self.most
        limits = (f" from 0 to {most}" if self.whole else "") + ("" if self.ignored is None else f", or {self.ignored}")
        expected = f"expected {self.what}{limits}. Correct it, or remove the sample{self.hint}."
        if self.dims not in (None, target_N.ndim - 1) or target_N.dtype.kind not in "biuf":
            return 0, f"{target_N.dtype} of shape {target_N.shape[1:]}; {expected}"
        rows = max(1, AT_ONCE * len(target_N) // max(1, target_N.size))  # masks may fill the memory
        for first in range(0, len(target_N), rows):
            block = target_N[first : first + rows]
            odd = ~(np.isfinite(block) & (block >= self.least) & (block <= most) | (block == self.ignored))
            if self.whole and block.dtype.kind == "f":
                odd |= block != np.trunc(block)
            if odd.any():
                return first + int(np.argwhere(odd)[0, 0]), f"{block[odd][0]}; {expected}"
        return None


class Task(nn.Module):
    """Subclass it in your own file: override `loss`, and whatever else differs.

    Before it calls anything, the engine sets `about`, the data set's description of itself. It averages `loss` over the whole
    global batch, and passes real samples only. Buffers move to the device; register them with persistent=False, so
    checkpoints contain the network only.
    """

    needs: ClassVar[tuple[str, ...]] = ()  # keys that `about` must have
    names: ClassVar[str] = (
        "classes"  # the key of `about` that names the values of an output, and of a metric with several
    )
    titles: ClassVar[Mapping[str, tuple[str, str]]] = {}  # of curves in the report: title and unit by metric, or `loss`
    # What makes predictions of outputs, for exported networks: softmax, next_token, sigmoid or identity. A class with other
    # `predictions` sets its own; None: an exported network returns its outputs as they are.
    activation: str | None = None
    # A loss between samples, such as a contrastive one: training and evaluation call `loss` with the outputs and the batch of all
    # processes, in the order of the global batch. It returns a number for each of these samples.
    between_samples: bool = False
    # The network's last layer computes in float32 under mixed precision, for outputs with more than 3 digits.
    float32_head: bool = False
    expects: Targets | None = None  # judged before training, or when they are read; None: any `target`
    about: Mapping[str, Any]

    def __init_subclass__(cls, **arguments: Any) -> None:
        """A class with its own `loss` takes any `target`, unless it says what it expects."""
        super().__init_subclass__(**arguments)
        nearest = next(each for each in cls.__mro__ if {"loss", "expects"} & vars(each).keys())
        if "expects" not in vars(nearest):
            cls.expects = None

    def bind(self, about: Mapping[str, Any]) -> None:
        """Raises UserError if `about` lacks a key that the task needs."""
        if missing := [name for name in self.needs if not about.get(name)]:
            raise UserError(
                f"the task {type(self).__name__} needs {', '.join(missing)} in the `about` of the data; this data has {', '.join(k for k in about if about[k]) or 'nothing'}. "
                "Choose a different task or data, or add it to the `about` of your data set. The classes of a torch Dataset are data.classes; "
                "those of a table are texts, or numbers from 0."
            )
        self.about = about

    @property
    def value_names(self) -> Sequence[Any]:
        """Of the classes, labels, ...; empty if the data has none."""
        return self.about.get(self.names) or ()

    def network_arguments(self) -> dict[str, Any]:
        """Arguments offered to the network. It gets those that its signature names."""
        return {"num_classes": len(self.value_names)} if self.names in self.needs else {}

    def outputs(self, net: Callable[..., Any], batch: Mapping[str, Any]) -> Any:
        """What the network makes of a batch. It can only be called: its other methods would bypass the strategy."""
        return net(batch["input"])

    def loss(self, output: Any, batch: Mapping[str, Any]) -> Tensor:
        """loss_B: one number per sample."""
        raise NotImplementedError(f"{type(self).__name__} has no `loss`")

    def weight(self, batch: Mapping[str, Any]) -> Tensor | None:
        """weight_B of the samples in the mean over a global batch; None: equal weights."""
        return None

    def metrics(self) -> dict[str, Metric]:
        """Metrics of an evaluation by name, besides `loss` and `count`."""
        return {}

    def metric_arguments(self) -> dict[str, Any]:
        """Arguments offered to metrics of the config."""
        return {"num_classes": len(self.value_names)} if self.names in self.needs else {}

    def metric_inputs(self, output: Any, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a metric's `update`."""
        return output, batch["target"]

    def predictions(self, output: Any) -> dict[str, Sequence[Any] | Tensor]:
        """Columns of a table of predictions, with a row per sample."""
        return dict(output) if isinstance(output, Mapping) else {"output": output}

    def targets(self, batch: Mapping[str, Any]) -> dict[str, Sequence[Any] | Tensor]:
        """The same of a batch's targets; none if they do not fit into a cell."""
        target = batch["target"]
        if isinstance(target, Tensor):
            fits = target.dim() == 1
        else:
            fits = isinstance(target, list | tuple) and all(isinstance(x, Plain) for x in target)
        return {"target": target} if fits else {}

    def top(self, output: Any, count: int) -> dict[str, Sequence[Any] | Tensor]:
        """Columns of the `count` most probable classes, for tasks that rank them: class, probability, class_2, probability_2, ..."""
        raise NotImplementedError

    def headline(self, report: Mapping[str, Any]) -> tuple[str, str]:
        """The name and value of the primary metric: the monitored one, or the first of `metrics` if that is the loss or nothing."""
        metric = (report["monitor"] or "val/loss").removeprefix("val/")
        wanted = f"test/{next(iter(self.metrics()), 'loss') if metric == 'loss' else metric}"
        # a metric with several values has no value of its own name
        name = wanted if wanted in report else next((n for n in report if n.startswith(f"{wanted}/")), "test/loss")
        return name.replace("/", " "), f"{report[name]:.4f} on {report['test/count']:,} {report['unit']}"

    def interval(self, report: Mapping[str, Any]) -> tuple[float, float] | None:
        """The 95% interval of that metric, if there is a simple one."""
        return None

    def curves(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """The report's curves: title, unit, columns of metrics.csv."""
        columns: dict[str, tuple[str, ...]] = {"loss": ("train/loss", "val/loss")}
        columns |= {name: (f"val/{name}",) for name in self.metrics()}
        titles = {"loss": ("Loss", "loss"), **self.titles}
        return [(*titles.get(name, (name, name)), shown) for name, shown in columns.items()]

    def test_panels(self) -> dict[str, Panel]:
        """The report's panels about the test set, besides the samples with the largest losses."""
        return {}

    def describe(self, output: Any, batch: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """For each sample, what the report says of it by name: texts, numbers, a Mask, Tokens."""
        columns: dict[str, Any] = {"target": batch.get("target"), **self.predictions(output)}
        count = len(batch["index"])
        small = {name: list(column) for name, column in columns.items() if is_small(column, count)}
        cells = {name: [x.tolist() if isinstance(x, Tensor) else x for x in column] for name, column in small.items()}
        return [{name: column[row] for name, column in cells.items()} for row in range(count)]


def validated_columns(columns: Mapping[str, Any], *, targets: bool = False) -> dict[str, Any]:
    """Raises UserError if predictions have a column that Lockstep writes itself; with `targets`, they may be among them."""
    taken = [name for name in columns if name in RESERVED or name.startswith("target/")]
    if taken := [name for name in taken if not targets or name.partition("/")[0] != "target"]:
        raise UserError(
            f"the predictions have a column {taken[0]}, which Lockstep's tables of predictions have themselves. Reserved are "
            f"{', '.join(RESERVED)} and target/... Rename the column."
        )
    return dict(columns)


def is_small(column: Any, count: int) -> bool:
    """Whether a column has a text, a number, or up to eight numbers for each of `count` samples."""
    if isinstance(column, Tensor):
        return column.dim() > 0 and len(column) == count and column[:1].numel() <= 8
    return isinstance(column, list | tuple) and len(column) == count and all(isinstance(x, Plain) for x in column)


def validate_outputs(output: Tensor, *shape: int) -> None:
    """Raises UserError if a network's output has a different shape."""
    if output.shape != shape:
        raise UserError(
            f"the network gives {tuple(output.shape)}, but the task and the data need {shape}. Choose a different model, or give "
            "it the number of outputs that the data needs."
        )


def loss_factors(task: Task, name: str, factors: Sequence[float] | None) -> Tensor | None:
    """The factors of a loss. Raises UserError if they are not one for each class or label."""
    if factors is None:
        return None
    if len(factors) != len(task.value_names):
        raise UserError(
            f"task.{name} has {len(factors)} numbers; the data has {len(task.value_names)} {task.names}. Give one for each."
        )
    return torch.tensor(factors, dtype=torch.float32)
