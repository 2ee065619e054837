"""Compares what two ways of running recorded: how far apart they are, and the first place where they part."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from lockstep.extras.check.record import Record
from lockstep.extras.comparison import relative, series
from lockstep.reporting.report import Report
from lockstep.run import RunFolder, metrics_of_test

# The largest relative difference that is rounding after a few steps, by the precision of the parameters. In float64, rounding is below
# 1e-13, and what depends on the division is rarely below 1e-6. Logged rows and metrics are means of float32.
ROUNDING = {"64-true": 1e-9, "32-true": 1e-4}
LOGGED, SMALL = 1e-5, 1e-3
NOISE = 1e-4  # of ROUNDING: the gradient of a tensor, relative to the largest, that consists of rounding only
SAME, ROUNDED, DIFFERS = "same bits", "rounding", "differs"
REFUSED, FAILED, NOT_RUN = "refused", "failed", "not run"


# Relative differences: of the gradients and the weights of the first step, of the weights after the last, of logged rows, of test metrics.
NUMBERS = ("gradients", "weights", "end", "rows", "metrics")
Difference = dict[
    str, Any
]  # of a way: a verdict, NUMBERS, and a note, which is where they part or why the way was refused


def found(
    way: str, verdict: str, precision: str = "", note: str = "", numbers: Sequence[float | None] = ()
) -> Difference:
    return {"way": way, "verdict": verdict, "precision": precision, "note": note, **dict(zip_longest(NUMBERS, numbers))}


class Outcome:
    """What a way of running left in its folders."""

    def __init__(self, run: Path, records: Path) -> None:
        self.run, self.records = run, records

    @cached_property
    def report(self) -> Report:
        return Report(RunFolder(self.run))

    @cached_property
    def ranks(self) -> list[Record]:
        return [torch.load(file, weights_only=True) for file in sorted(self.records.glob("*.pt"))]

    @property
    def steps(self) -> dict[int, Record]:
        return {number: step for number, step in self.ranks[0]["steps"].items() if "end" in step}

    @cached_property
    def rows(self) -> dict[tuple[str, int], float]:
        """Logged numbers by name and step, without those of rank 0 alone and those that are measured."""
        left_out = ("time", "epoch", *self.ranks[0]["of_rank_0"])
        curves = {name: curve for name, curve in series(self.report).items() if not name.startswith(left_out)}
        return {(name, step): value for name, curve in curves.items() for step, value in zip(*curve, strict=True)}

    @property
    def tested(self) -> dict[str, float]:
        file = self.run / "eval.json"
        report = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else self.report
        return {name: report[name] for name in metrics_of_test(report) if "(rank" not in name}

    def in_order(self, key: str, number: int) -> list[Any]:
        """Samples, calls of layers or losses of all micro-batches, in the order of the global batch."""
        found = [item for rank in self.ranks for item in rank["steps"][number][key].items()]
        return [each for _, each in sorted(found, key=lambda item: item[0])]


def apart(a: Mapping[Any, float], b: Mapping[Any, float]) -> float:
    """The largest difference of numbers of the same name: relative, or for small numbers, in units of SMALL."""
    both = [(a[name], b[name]) for name in a.keys() & b.keys()]
    return max((min(relative(x, y), abs(x - y) / SMALL) for x, y in both), default=0.0)


def distance(a: Mapping[str, Record], b: Mapping[str, Record], names: Sequence[str]) -> float:
    """The norm of the difference of all tensors together, relative to their norm."""
    names = [name for name in names if name in a]
    if any(name not in b or a[name]["shape"] != b[name]["shape"] for name in names):
        return math.inf
    different = [a[name]["sums"][0] - b[name]["sums"][0] for name in names if a[name]["bits"] != b[name]["bits"]]
    apart, total = (
        float(torch.cat(each).norm()) if each else 0.0 for each in (different, [a[n]["sums"][0] for n in names])
    )
    return apart / total if total else math.inf if apart else 0.0


def trained(step: Record, tolerance: float) -> list[str]:
    """The tensors without those whose gradients are rounding errors: optimizers such as Adam make large steps of them."""
    norms = {name: float(each["sums"][0].norm()) for name, each in step["gradients"].items()}
    least = NOISE * tolerance * max(norms.values(), default=0.0)
    return [name for name in step["end"] if norms.get(name, math.inf) > least]


def difference(way: str, ref: Outcome, other: Outcome) -> Difference:
    """Of a way from the reference, over the steps that both have."""
    precision, metrics = ref.ranks[0]["precision"], apart(ref.tested, other.tested)
    tolerance = ROUNDING.get(precision, 5e-2)
    if not other.ranks:  # an evaluation
        verdict = SAME if not metrics else ROUNDED if metrics <= max(LOGGED, tolerance) else DIFFERS
        return found(way, verdict, precision, numbers=[None] * 4 + [metrics])
    first, *_, last = [number for number in ref.steps if number in other.steps] * 2
    names, ends = trained(ref.steps[first], tolerance), [each.steps[last]["end"] for each in (ref, other)]
    begun = [(each.steps[first]["gradients"], each.steps[first]["end"]) for each in (ref, other)]
    steps = [distance(a, b, names) for a, b in (*zip(*begun, strict=True), ends)]
    logged = [apart(ref.rows, other.rows), metrics]
    bits = [{name: each["bits"] for name, each in end.items()} for end in ends]
    is_rounding = max(steps) <= tolerance and max(logged) <= max(LOGGED, tolerance)
    verdict = SAME if bits[0] == bits[1] and not max(logged) else ROUNDED if is_rounding else DIFFERS
    note = next(parting(ref, other, tolerance)) if verdict == DIFFERS else ""
    return found(way, verdict, precision, note, [*steps, *logged])


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


def differ(whole: list[Record], parts: Sequence[list[Record]], tolerance: float, *, scaled: bool = False) -> bool:
    """Whether lists of tensors differ. `scaled`: the parts may have a factor, as gradients of the means of micro-batches."""
    for one, *each in zip(whole, *parts, strict=False):
        for x, y in pairs(each, one):
            factor = float((x @ y) / (y @ y).clamp(min=1e-300)) if scaled else 1.0
            if float((x - factor * y).norm()) > tolerance * float(x.norm()) + 1e-300:
                return True
    return False


def parting(ref: Outcome, other: Outcome, tolerance: float) -> Iterator[str]:
    """Where the two part: the first step, and in it samples, layers, loss, gradients and weights in this order."""
    shared = [number for number in ref.steps if number in other.steps]
    for number in shared:
        when = "" if number == shared[0] else f", at step {number}"
        yield from (f"{text}{when}" for text in parting_in_step(ref, other, number, tolerance))
    yield "what is logged or evaluated, not the steps"


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
    if relative(*(fmean(way.in_order("loss", number)) for way in (ref, other))) > max(tolerance, LOGGED):
        yield f"the loss: {places['loss']}"
    yield from differing
    if name := first("gradients"):
        yield f"the gradient of {name}: {places.get(name.rpartition('.')[0], places['step'])}, or a hook of gradients"
    if name := first("end"):
        yield f"{name} after the step: {places['optimizer'] if name in step['gradients'] else 'it is written in forward'}"


def layers(whole: list[Any], parts: list[Any], places: Mapping[str, str], tolerance: float) -> Iterator[str]:
    """The first calls that differ, if both ways call the same layers in the same order."""
    order = [[(call["path"], call["what"]) for call in calls] for calls in (*whole, *parts)]
    if len(whole) != 1 or order.count(order[0]) != len(order):
        return
    for call, *others in zip(whole[0], *parts, strict=True):
        path, what = call["path"], call["what"]
        if differ(call["tensors"], [each["tensors"] for each in others], tolerance, scaled=what == "gradient"):
            outer = places.get(path.rpartition(".")[0], places["step" if what == "input" else "loss"])
            source = places[path] if what == "output" else outer
            draws = " draws random numbers that do not belong to a sample" if call.get("draws") else ""
            yield f"the {what} of {path}: {source}{draws}"
