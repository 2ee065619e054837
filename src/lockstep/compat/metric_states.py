"""The states of metrics over all processes, for any kind of state and any number of samples per process.

torchmetrics gathers state by state and tensor by tensor. That fails if processes have lists of different lengths, such
as a tensor for each image. Remove this file when torchmetrics gathers a list state of any length in one call:
tests/compat/test_metric_states.py fails then.
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

from lockstep.machine.world import all_gather_objects

ENDS = "lengths_by_batch"  # attribute added to a metric: the lengths of its list states after each batch


@dataclass(frozen=True)
class Stored:
    """A tensor as an array of bytes: pickle would write the whole storage of a view, and take 0.1 ms per tensor."""

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
    """The metrics, and those inside wrappers."""
    return [child for metric in metrics for child in metric.modules() if isinstance(child, Metric)]


def exact_on(device: torch.device) -> torch.dtype:
    """The dtype of sums: in float32, the order of 10,000 additions changes the sixth digit. MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def prepare(metric: Metric, device: torch.device, *, of_panel: bool = False) -> None:
    """Moves a metric to `device` before an evaluation, and makes its sums exact.

    Integers stay integers, and a custom network keeps its dtype. A panel declares which of its numbers are float64, and
    keeps the others.
    """
    exact = exact_on(device)
    for part in parts([metric]):
        for name, default in part._defaults.items():
            if not isinstance(default, Tensor) or not default.is_floating_point():
                continue
            if default.dtype == torch.float64 or not of_panel:
                part._defaults[name] = default.to(exact)
                setattr(part, name, getattr(part, name).to(exact))
    metric.to(device).eval()
    for part in () if of_panel else parts([metric]):
        part._dtype = exact  # some metrics convert their inputs to it


def update(metric: Metric, batch_idx: int, *inputs: Any) -> None:
    """Updates a metric, and records the lengths of its list states: of_all_processes orders them by sample."""
    metric.update(*inputs)
    for part in parts([metric]):
        lengths = {name: len(state) for name, state in part.metric_state.items() if isinstance(state, list)}
        if lengths:
            vars(part).setdefault(ENDS, {})[batch_idx] = lengths


@contextlib.contextmanager
def of_all_processes(metrics: Sequence[Metric]) -> Iterator[None]:
    """Within it, the metrics have the states that a single process would have. Every process must call it.

    Every process has samples of each evaluation. Sums and similar states are reduced as in torchmetrics. Lists are
    joined in the order of the samples. A state with dist_reduce_fx="mean" is the mean over processes, regardless of their numbers
    of samples.
    """
    all_parts, replaced = parts(metrics), []
    by_rank = all_gather_objects([state_to_send(metric) for metric in all_parts])
    for metric, *sent_states in zip(all_parts, *by_rank, strict=True):
        if len(by_rank) > 1 and metric.update_called:  # a wrapper may leave out an update
            # with that function, compute would gather again
            new = join_states(metric, sent_states) | {"distributed_available_fn": None}
            # only these: compute may set other attributes, such as MinMaxMetric's smallest value so far
            replaced.append((vars(metric), new, {name: vars(metric)[name] for name in new if name in vars(metric)}))
            vars(metric).update(new)
    try:
        yield
    finally:
        for attributes, new, before in replaced:
            for name in new:
                del attributes[name]
            attributes.update(before)
        for metric in all_parts:
            vars(metric).pop(ENDS, None)


def state_to_send(metric: Metric) -> dict[str, Any]:
    """What the other processes need from this process's metric."""
    return {"states": apply_to_collection(metric.metric_state, Tensor, Stored.of), ENDS: vars(metric).get(ENDS, {})}


def join_states(metric: Metric, sent_states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all processes as one."""
    device = metric.device
    states = [apply_to_collection(s["states"], Stored, lambda stored: stored.tensor(device)) for s in sent_states]
    return {n: join_state(metric, n, [state[n] for state in states], sent_states) for n in states[0]}


def join_state(metric: Metric, name: str, values: list[Any], sent_states: Sequence[Mapping[str, Any]]) -> Any:
    if isinstance(values[0], list):
        return in_order(values, [{batch: ends[name] for batch, ends in s[ENDS].items()} for s in sent_states])
    reduction: Any = metric._reductions[name]
    if reduction is dim_zero_cat:
        return dim_zero_cat(values)
    return reduction(torch.stack(values)) if reduction else torch.stack(values)


def in_order(lists: list[list[Any]], ends: list[dict[int, int]]) -> list[Any]:
    """Lists joined batch by batch, as a single process would have filled them.

    They are joined rank by rank if a metric does not only append.
    """
    slices = []
    for rank, (entries, rank_ends) in enumerate(zip(lists, ends, strict=True)):
        bounds = [0, *rank_ends.values()]
        if bounds != sorted(bounds) or bounds[-1] != len(entries):
            return [entry for values in lists for entry in values]
        slices += [(batch, rank, entries[a:b]) for batch, a, b in zip(rank_ends, bounds, bounds[1:], strict=False)]
    return [entry for _, _, part in sorted(slices, key=lambda s: s[:2]) for entry in part]
