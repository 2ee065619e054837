"""The states of metrics over all processes, whatever their kinds and however unequal the processes' shares.

torchmetrics gathers state by state and tensor by tensor. That fails if the processes have lists of different lengths, such as
a tensor for each image, and on a process without samples, whose states may not have their final shapes yet. Remove this file when
torchmetrics gathers a list state in one call, whatever its length: tests/compat/test_metric_states.py fails then.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lockstep.machine.world import objects_of_all

ENDS = "lengths_by_batch"  # the attribute of a metric for the lengths of its list states after each batch
MISSING = object()
PLAIN = (bool, int, float, str, tuple, torch.dtype, type(None))


@dataclass(frozen=True)
class Stored:
    """A tensor as an array of bytes: pickle would write the whole storage of a view, and take 0.1 ms for each."""

    content: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str

    @classmethod
    def of(cls, tensor: Tensor) -> "Stored":
        # a clone, because one element of an expanded tensor has a stride of 0
        flat = tensor.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
        content = flat.view(torch.uint8).numpy()
        return cls(content, tensor.dtype, tuple(tensor.shape), tensor.device.type)

    def tensor(self, device: torch.device) -> Tensor:
        """On `device`, unless the metric keeps this state on the CPU."""
        tensor = torch.from_numpy(self.content).view(self.dtype).reshape(self.shape)
        return tensor.to(device if self.device == device.type else "cpu")


def parts(metrics: Sequence[Metric]) -> list[Metric]:
    """The metrics, and those that wrappers hold."""
    return [each for metric in metrics for each in metric.modules() if isinstance(each, Metric)]


def exact_on(device: torch.device) -> torch.dtype:
    """Of sums: the order of 10,000 additions in float32 changes the sixth digit. MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def prepare(metric: Metric, device: torch.device, *, of_panel: bool = False) -> None:
    """Before an evaluation: moves the metric, whose sums are exact then; integers stay integers, and a custom network keeps its dtype.

    A panel says itself which of its numbers are float64, and keeps the others.
    """
    exact = exact_on(device)
    for each in parts([metric]):
        for name, default in each._defaults.items():
            if not isinstance(default, Tensor) or not default.is_floating_point():
                continue
            if default.dtype == torch.float64 or not of_panel:
                each._defaults[name] = default.to(exact)
                setattr(each, name, getattr(each, name).to(exact))
    metric.to(device).eval()
    for each in () if of_panel else parts([metric]):
        each._dtype = exact  # to which some metrics convert their inputs


def update(metric: Metric, batch_idx: int, *inputs: Any) -> None:
    """Updates a metric. Records how long its list states are then, so that of_all_processes can order them by sample."""
    metric.update(*inputs)
    for each in parts([metric]):
        lengths = {name: len(state) for name, state in each.metric_state.items() if isinstance(state, list)}
        if lengths:
            vars(each).setdefault(ENDS, {})[batch_idx] = lengths


@contextlib.contextmanager
def of_all_processes(metrics: Sequence[Metric]) -> Iterator[None]:
    """Within, the metrics have the states that one process would have; called on every rank.

    Sums and the like are reduced as torchmetrics does, over the processes that have samples. Lists are joined in the samples'
    order. A state with dist_reduce_fx="mean" is the mean over processes, whatever their shares.
    """
    found, before = parts(metrics), []
    everyone = objects_of_all([sent(metric) for metric in found])
    if len(everyone) > 1:
        for metric, *given in zip(found, *everyone, strict=True):
            new = joined(metric, given) | {"distributed_available_fn": None}  # or compute would gather again
            # only these: a metric may note something in compute, such as MinMaxMetric its smallest value so far
            before.append((vars(metric), {name: vars(metric).get(name, MISSING) for name in new}))
            vars(metric).update(new)
    try:
        yield
    finally:
        for attributes, own in before:
            attributes.update(own)
            for name in [name for name, value in own.items() if value is MISSING]:
                del attributes[name]
        for metric in found:
            vars(metric).pop(ENDS, None)


def sent(metric: Metric) -> dict[str, Any]:
    """What the other processes need of a metric; nothing without samples."""
    if not metric.update_called:
        return {}
    # MeanIoU and others learn plain attributes, such as the number of classes, from their first samples
    plain = {name: value for name, value in vars(metric).items() if isinstance(value, PLAIN)}
    states = apply_to_collection(metric.metric_state, Tensor, Stored.of)
    reductions = {
        name: f for name, f in metric._reductions.items() if getattr(f, "__module__", "").startswith("torchmetrics.")
    }
    return {"plain": plain, "states": states, "reductions": reductions, ENDS: vars(metric).get(ENDS, {})}


def joined(metric: Metric, given: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all processes as one, and for a process without samples what the first of the others has learned from its own."""
    filled = [each for each in given if each]
    if not filled:
        return {}
    device = metric.device
    states = [apply_to_collection(each["states"], Stored, lambda stored: stored.tensor(device)) for each in filled]
    plain = {} if metric.update_called else filled[0]["plain"]
    return plain | {name: whole(metric, name, [each[name] for each in states], filled) for name in states[0]}


def whole(metric: Metric, name: str, values: list[Any], filled: Sequence[Mapping[str, Any]]) -> Any:
    if isinstance(values[0], list):
        return in_order(values, [{batch: ends[name] for batch, ends in each[ENDS].items()} for each in filled])
    if len(values) == 1:
        return values[0]
    # MeanIoU adds its states in its first update
    reduction = metric._reductions.get(name, filled[0]["reductions"].get(name))
    if reduction is dim_zero_cat:
        return dim_zero_cat(values)
    return reduction(torch.stack(values)) if reduction else torch.stack(values)


def in_order(lists: list[list[Any]], ends: list[dict[int, int]]) -> list[Any]:
    """Lists joined batch by batch, as one process would have filled them; one after the other if a metric does not only append."""
    slices = []
    for rank, (entries, of_rank) in enumerate(zip(lists, ends, strict=True)):
        bounds = [0, *of_rank.values()]
        if bounds != sorted(bounds) or bounds[-1] != len(entries):
            return [entry for each in lists for entry in each]
        slices += [(batch, rank, entries[a:b]) for batch, a, b in zip(of_rank, bounds, bounds[1:], strict=False)]
    return [entry for _, _, part in sorted(slices, key=lambda s: s[:2]) for entry in part]
