"""Compares what two ways of running recorded: how far apart they are, and the first place where they part."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.extras.comparison import Numbers, Record, apart, distance, relative, rows
from lockstep.reporting.report import Report
from lockstep.run import RunFolder, metrics_of_test

# The largest relative difference that is rounding after a few steps, by the precision of the parameters. In float64, rounding is below
# 1e-13, and what depends on the division is rarely below 1e-6. Logged rows and metrics are means of float32.
ROUNDING = {"64-true": 1e-9, "32-true": 1e-4}
# LATER times ROUNDING: of the gradients after the first step, which steps amplify. In float32, they soon do so beyond any limit: of ten steps
# of the default network with SGD, weights are 1e-5 apart after the fifth and 1e-3 after the last, so only the first FEW steps count.
LATER, FEW = 100, 5
LOGGED = 1e-5
NOISE = 1e-4  # of ROUNDING: the gradient of a tensor, relative to the largest, that consists of rounding only
SAME, ROUNDED, DIFFERS = "same bits", "rounding", "differs"
REFUSED, FAILED, NOT_RUN = "refused", "failed", "not run"
# Relative differences: of the gradients and the weights of the first step, of the weights after the last, of logged rows, of test metrics.
NUMBERS = ("gradients", "weights", "end", "rows", "metrics")
# Of a way: a verdict, NUMBERS, and a note, which is where they part, at `step`, or why the way was refused.
Difference = dict[str, Any]


def found(way: str, verdict: str, numbers: Sequence[float | None] = (), **more: Any) -> Difference:
    return {"way": way, "verdict": verdict, "note": "", "step": 0, **dict(zip_longest(NUMBERS, numbers)), **more}


class Outcome:
    """What a way of running left in its folders."""

    def __init__(self, run: Path, records: Path) -> None:
        self.run, self.records = run, records

    @cached_property
    def ranks(self) -> list[Record]:
        return [torch.load(file, weights_only=True) for file in sorted(self.records.glob("*.pt"))]

    @property
    def steps(self) -> dict[int, Record]:
        return {number: step for number, step in self.ranks[0]["steps"].items() if "end" in step}

    @cached_property
    def rows(self) -> Numbers:
        """Without those of rank 0 alone."""
        return rows(Report(RunFolder(self.run)), self.ranks[0]["of_rank_0"])

    @cached_property
    def tested(self) -> dict[str, float]:
        file = self.run / "eval.json"
        if file.is_file():
            return {n: v for n, v in json.loads(file.read_text("utf-8")).items() if not isinstance(v, str)}
        report = Report(RunFolder(self.run))
        return {name: report[name] for name in metrics_of_test(report)}

    def in_order(self, key: str, number: int) -> list[Any]:
        """Samples, calls of layers or losses of all micro-batches, in the order of the global batch."""
        found = [item for rank in self.ranks for item in rank["steps"][number][key].items()]
        return [each for _, each in sorted(found, key=lambda item: item[0])]


def trained(step: Record, tolerance: float) -> list[str]:
    """The tensors without those whose gradients are rounding errors: optimizers such as Adam make large steps of them."""
    norms = {name: each["sums"][0].norm() for name, each in step["gradients"].items()}
    least = NOISE * tolerance * max(norms.values(), default=0.0)
    return [name for name in step["end"] if norms.get(name, math.inf) > least]


def difference(way: str, ref: Outcome, other: Outcome) -> Difference:
    """Of a way from the reference, over the steps that both have."""
    tolerance, metrics = ROUNDING.get(ref.ranks[0]["precision"], 5e-2), apart(ref.tested, other.tested)
    if not other.ranks:  # an evaluation
        if not ref.tested.keys() & other.tested.keys():
            return found(way, NOT_RUN, note="the test logs no metrics of all processes")
        verdict = SAME if not metrics else ROUNDED if metrics <= max(LOGGED, tolerance) else DIFFERS
        return found(way, verdict, [None] * 4 + [metrics])
    if not (shared := [number for number in ref.steps if number in other.steps]):
        return found(way, FAILED, note="it has none of the steps")
    names = trained(ref.steps[shared[0]], tolerance)
    few = shared[: None if tolerance < LOGGED else FEW]
    both = [(ref.steps[number], other.steps[number]) for number in few]
    gradients, weights = ([distance(a[key], b[key], names) for a, b in both] for key in ("gradients", "end"))
    steps, later = [gradients[0], weights[0], weights[-1]], max(gradients) / LATER
    ends = [{name: each["bits"] for name, each in way.steps[shared[-1]]["end"].items()} for way in (ref, other)]
    # A module may log the loss of each process or micro-batch, without sync_dist=True.
    kept = {row: value for row, value in ref.rows.items() if row[0] not in ref.ranks[0]["of_steps"]}
    logged = max(apart(kept, other.rows), metrics) if few == shared else 0.0
    is_rounding = max(*steps, later) <= tolerance and logged <= max(LOGGED, tolerance)
    verdict = SAME if ends[0] == ends[1] and not logged else ROUNDED if is_rounding else DIFFERS
    step, note = next(parting(ref, other, few, tolerance)) if verdict == DIFFERS else (0, "")
    return found(way, verdict, [*steps, apart(ref.rows, other.rows), metrics], note=note, step=step)


def pairs(parts: Sequence[Record], whole: Record) -> list[tuple[Tensor, Tensor]]:
    """Sums of the whole and of its parts, joined along the dimension of the samples. None if the shapes do not fit."""
    shapes, shape = [part["shape"] for part in parts], whole["shape"]
    if all(each == shape for each in shapes):
        return [(whole["sums"][0], part["sums"][0]) for part in parts]
    for dim in range(min(len(shape), len(whole["sums"]))):
        others = [each[:dim] + each[dim + 1 :] for each in (*shapes, shape)]
        if others.count(others[0]) == len(others) and sum(each[dim] for each in shapes) == shape[dim]:
            return [(whole["sums"][dim], torch.cat([part["sums"][dim] for part in parts]))]
    return []


def differ(whole: list[Record], parts: Sequence[list[Record]], tolerance: float, factor: float = 1.0) -> bool:
    """Whether lists of tensors differ. `factor`: of the parts."""
    both = [pair for one, *each in zip(whole, *parts, strict=False) for pair in pairs(each, one)]
    return any((x - factor * y).norm() > tolerance * x.norm() + 1e-300 for x, y in both)


def owner(path: str, places: Mapping[str, str], default: str) -> str:
    """The place of the module that calls the one at `path`."""
    path = path.rpartition(".")[0]
    return places.get(path) or (owner(path, places, default) if path else places[default])


def parting(ref: Outcome, other: Outcome, shared: list[int], tolerance: float) -> Iterator[tuple[int, str]]:
    """Where the two part: the first step, and in it samples, layers, loss, gradients and weights in this order."""
    for number in shared:
        when = "" if number == shared[0] else f", at step {number}"
        yield from ((number, f"{text}{when}") for text in parting_in_step(ref, other, number, tolerance))
    yield 0, "what is logged or evaluated, not the steps"


def parting_in_step(ref: Outcome, other: Outcome, number: int, tolerance: float) -> Iterator[str]:
    step, same, places = ref.steps[number], other.steps[number], ref.ranks[0]["places"]

    def first(key: str) -> str:
        names = trained(step, tolerance)
        return next((name for name in names if distance(step[key], same[key], [name]) > tolerance), "")

    if name := first("begin"):
        yield f"{name} before the step: a hook or callback changed it between steps, or a resume did not restore it"
    whole, parts = (way.in_order("samples", number) for way in (ref, other))
    if len(whole) == 1 and differ(whole[0], parts, tolerance):
        yield f"the samples of the batch: {places['samples']}"
    differing = list(layers(ref.in_order("calls", number), other.in_order("calls", number), places, tolerance))
    yield from (text for text in differing if not text.startswith("the gradient"))
    if relative(*(sum(way.in_order("loss", number)) / len(way.ranks) for way in (ref, other))) > max(tolerance, LOGGED):
        yield f"the loss: {places['loss']}"
    yield from differing
    if name := first("gradients"):
        layer = name.rpartition(".")[0]
        after = owner(layer, places, "step")
        yield f"the gradient of {name}: {places.get(layer, after)}, what {after} does with its output, or a hook"
    if name := first("end"):
        yield f"{name} after the step: {places['optimizer'] if name in step['gradients'] else 'it is written in forward'}"


def layers(whole: list[Any], parts: list[Any], places: Mapping[str, str], tolerance: float) -> Iterator[str]:
    """The first calls that differ, if both ways call the same layers in the same order."""
    order = [[(call["path"], call["what"]) for call in calls] for calls in (*whole, *parts)]
    if len(whole) != 1 or order.count(order[0]) != len(order):
        return
    factor = 0.0  # of gradients of the means of micro-batches: that of the gradient next to the loss
    for call, *others in zip(whole[0], *parts, strict=True):
        path, what, tensors = call["path"], call["what"], [each["tensors"] for each in others]
        if what == "gradient" and not factor:
            both = pairs([each[0] for each in tensors], call["tensors"][0])
            factor = next((float(x @ y / (y @ y)) for x, y in both if y.any()), 0.0)
        if differ(call["tensors"], tensors, tolerance, factor if what == "gradient" else 1.0):
            outer = owner(path, places, "step" if what == "input" else "loss")
            source = places[path] if what == "output" else outer
            draws = " draws random numbers that do not belong to a sample" if call.get("draws") else ""
            yield f"the {what} of {path}: {source}{draws}"
