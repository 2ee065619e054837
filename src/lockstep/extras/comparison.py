"""Where two runs differ: config, data, logged rows, metrics, weights and the rest of their state."""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoints.finding import leaves
from lockstep.config.compose import PLACE
from lockstep.reporting.report import Curve, Report
from lockstep.run import find_run

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor

MEASURED = ("_per_s", "_memory_gib")  # endings of columns that differ between any two runs
SMALL = 1e-3
DIMENSIONS = 4  # of a tensor, of which a sketch has sums
AT_ONCE = 2**19  # numbers of a tensor that are copied at once: larger copies fragment the heap
Record = dict[str, Any]
Numbers = dict[tuple[str, int], float]
FORGOTTEN = ".current_score"  # score of the last validation; ModelCheckpoint saves it but does not load it
# Rounding starts small and grows step by step; a different batch or formula shows at once.
BEGINS = 1e-6  # largest relative difference in the first row
LEAP = 10.0  # largest growth factor from one row to the next
ENDS = 1e-2  # largest relative difference at the end
FEWEST_ROWS = 10
LOSS, FULL_PRECISIONS = "train/loss", ("32-true", "32", "64-true", "64")
DATA = ("data/name", "data/source", "data/sha256", "data/train", "data/val", "data/test")


def find(name: str, runs_dir: Path) -> Report:
    """The run with this name or folder. Raises UserError: it does not exist or is damaged."""
    folder = find_run(name, runs_dir)
    folder.saved_config()  # the settings of a report are empty if the config is damaged
    return Report(folder)


def relative(a: float, b: float) -> float:
    """The difference divided by the first value; 0 for equal values and for two NaNs."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / abs(a) if a and not math.isnan(a - b) else math.inf


def differences(a: Mapping[str, Any], b: Mapping[str, Any], *, tolerance: float = 0.0) -> Iterator[str]:
    """One line for each value that differs, of numbers by more than the tolerance."""
    for key in dict.fromkeys([*a, *b]):
        x, y = a.get(key, "absent"), b.get(key, "absent")
        are_numbers = isinstance(x, int | float) and isinstance(y, int | float)
        if relative(x, y) > tolerance if tolerance and are_numbers else x != y:
            yield f"{key}: {x} | {y}"


def series(run: Report) -> dict[str, Curve]:
    """The logged columns without measurements, because these differ between any two runs."""
    return {name: curve for name, curve in run.curves.items() if not name.endswith(MEASURED)}


def rows(run: Report, left_out: Iterable[str]) -> Numbers:
    """The logged numbers by name and step, without the epoch and without `left_out`."""
    return {
        (name, step): value
        for name, curve in series(run).items()
        if not name.startswith(("epoch", *left_out))
        for step, value in zip(*curve, strict=True)
    }


def apart(a: Mapping[Any, float], b: Mapping[Any, float]) -> float:
    """The largest difference of numbers of the same name: relative, or for small numbers, in units of SMALL."""
    both = [(a[name], b[name]) for name in a.keys() & b.keys()]
    return max((min(relative(x, y), abs(x - y) / SMALL) for x, y in both), default=0.0)


def log_differences(a: Report, b: Report, tolerance: float) -> Iterator[str]:
    """One line for each metric that differs, with the first step at which it does."""
    ours, theirs, no_rows = series(a), series(b), Curve([], [])
    for name in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(name, no_rows), theirs.get(name, no_rows)
        if one.steps != other.steps:
            step = min({*one.steps} ^ {*other.steps}, default=0)
            yield f"{name}: {len(one.steps)} | {len(other.steps)} rows; only the {'first' if step in one.steps else 'second'} run has step {step}"
            continue
        gaps = list(map(relative, one.values, other.values))
        differing = [index for index, gap in enumerate(gaps) if gap > tolerance]
        for i in differing[:1]:
            first = f"the first at step {one.steps[i]} ({one.values[i]} | {other.values[i]})"
            yield f"{name}: {len(differing)} of {len(gaps)} rows differ, {first}, by at most {max(gaps):.2g}"


def rounding_verdict(a: Report, b: Report) -> tuple[bool, str]:
    """Whether the losses of two runs drift apart as rounding does, and the reason."""
    ours, theirs = (dict(zip(*run.curves.get(LOSS, ([], [])), strict=True)) for run in (a, b))
    gaps = {step: relative(x, theirs[step]) for step, x in ours.items() if step in theirs}
    purpose = "to distinguish rounding from a real difference"
    if any(str(run.settings.get("trainer.precision")) not in FULL_PRECISIONS for run in (a, b)):
        return False, f"rerun with trainer.precision=32-true {purpose}"
    if len(gaps) < FEWEST_ROWS:
        return False, f"compare runs with trainer.log_every_n_steps=1 and at least {FEWEST_ROWS} steps {purpose}"
    first, peak = min(gaps), BEGINS
    begins = f"{LOSS} differs by {gaps[first]:.2g}"
    if gaps[first] > BEGINS:
        return False, f"{begins} already at step {first}, which is more than rounding"
    for step, gap in gaps.items():
        if gap > LEAP * peak:
            return False, f"the difference of {LOSS} jumps at step {step}, from {peak:.2g} to {gap:.2g}: not rounding"
        peak = max(peak, gap)
    return True, f"{begins} at step {first}, by at most {peak:.2g} later, without jumps"


def tensor_difference(x: Any, y: Any) -> float:
    """Norm of the difference divided by the norm, in float64; 0 only if all bits are equal."""
    import torch

    if x.shape != y.shape or x.dtype != y.dtype:
        return math.inf
    if torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (x, y))):
        return 0.0
    x, y = x.double(), y.double()
    difference = float((x - y).norm() / x.norm().clamp(min=1e-300))
    return max(difference, 5e-324) if math.isfinite(difference) else math.inf  # -0.0 is not 0.0 bit by bit


def state_differences(one: Path, other: Path, tolerance: float, parts: Iterable[str]) -> Iterator[str]:
    """Differences of two checkpoints in each of `parts`: the tensor that differs most, and other values."""
    from torch import Tensor

    from lockstep.checkpoints.weights import read

    def values(path: Path, part: str) -> dict[str, Any]:
        run_dir = str(path.resolve().parent.parent)  # the paths of best checkpoints are absolute
        items = ((".".join(map(str, keys)), leaf) for keys, leaf in leaves(contents[path].values.get(part, {})))
        return {key.replace(run_dir, ""): v.replace(run_dir, "") if isinstance(v, str) else v for key, v in items}

    contents = {path: read(path) for path in (one, other)}
    for part in parts:
        a, b = values(one, part), values(other, part)
        for which, keys in (("first", a.keys() - b.keys()), ("second", b.keys() - a.keys())):
            if keys:
                yield f"{part}: only in the {which} run: {', '.join(sorted(keys)[:5])}{', ...' * (len(keys) > 5)}"
        gaps = dict[str, float]()
        for key in (key for key in a if key in b):
            x, y = a[key], b[key]
            if isinstance(x, Tensor) and isinstance(y, Tensor):
                gaps[key] = tensor_difference(x, y)
            elif not key.endswith(FORGOTTEN) and (type(x), x) != (type(y), y):
                yield f"{part}: {key}: {x} | {y}"
        count, worst = sum(gap > tolerance for gap in gaps.values()), max(gaps, key=gaps.__getitem__, default="")
        if count:
            yield f"{part}: {count} of {len(gaps)} tensors differ; the largest difference is in {worst} ({gaps[worst]:.2g})"


def first_different_digest(a: Report, b: Report) -> Iterator[str]:
    """The first step, logical rank and tensors that differ; nothing if all are equal or a run has no digests (`exact.digests`)."""
    ours, theirs = (
        {(row["step"], row["what"], row["name"]): row["digest"] for row in run.run_folder.digests_log.rows()}
        for run in (a, b)
    )
    different = [key for key, digest in ours.items() if theirs.get(key, digest) != digest]
    for step, what, _ in different[:1]:
        names = [key[2] for key in different if key[:2] == (step, what)]
        rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"the runs diverge at step {step}, in the {what} {', '.join(names[:3])}{rest}"


def checkpoints(run: Report) -> dict[str, Path]:
    """The last and the tested checkpoint, if they exist."""
    folder = run.run_folder.checkpoints
    paths = {"last": folder / "last.ckpt", "tested": folder / Path(str(run.get("checkpoint"))).name}
    return {name: path for name, path in paths.items() if os.path.exists(path)}  # noqa: PTH110 - Path.exists raises for long names


def compare(a: Report, b: Report, *, exact: bool, tolerance: float) -> dict[str, list[str]]:
    """Differences by section; `config` and `data` are informational."""
    allowed = 0.0 if exact else tolerance
    parts = ["state_dict", "current_model_state"]
    if exact:
        batches_are_divided = all(run.settings.get("exact.logical_ranks") for run in (a, b))
        counted = [] if batches_are_divided else ["loops"]  # counts the micro-batches of one process
        parts += ["optimizer_states", "lr_schedulers", "callbacks", *counted]
    configs = ({key: value for key, value in run.settings.items() if key not in PLACE} for run in (a, b))
    logged = [key for run in (a, b) for key in run if key in series(run)]
    values = [{key: run.get(key) for key in (*logged, "train/steps", "train/epochs")} for run in (a, b)]
    data = ({key: run.get(key) for key in DATA} for run in (a, b))
    ours, theirs = checkpoints(a), checkpoints(b)
    names = ({name: path.name if exact else "present" for name, path in paths.items()} for paths in (ours, theirs))
    weights = [*(first_different_digest(a, b) if exact else ()), *differences(*names)]
    for name in ours:
        if name in theirs:
            weights += [f"{name}: {line}" for line in state_differences(ours[name], theirs[name], allowed, parts)]
    return {
        "config": list(differences(*configs)),
        "data": list(differences(*data)),
        "log": list(log_differences(a, b, allowed)),
        "metrics": list(differences(*values, tolerance=allowed)),
        "weights": weights + ["neither run has a checkpoint to compare"] * (not ours and not theirs),
    }


def agree(diffs: dict[str, list[str]]) -> bool:
    return not any(diffs[section] for section in ("log", "metrics", "weights"))


# --- Sketches of tensors ---


@cache
def signs(count: int) -> "Tensor":
    import numpy as np
    import torch

    return torch.from_numpy(np.random.default_rng(count).choice([-1.0, 1.0], count))


def sketch(tensor: "Tensor", dimensions: int = DIMENSIONS) -> Record:
    """The shape, a digest of the bits, and sums of the numbers with random signs, for each index of each of the first dimensions.

    Their squared differences estimate the squared norm of the difference (Johnson and Lindenstrauss, 1984), and sketches of parts can be
    joined to that of the whole. A collective call for shards.
    """
    import torch
    from torch.distributed.tensor import DTensor

    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    whole = whole.detach().to_dense().cpu()
    rows = torch.atleast_1d(whole if whole.numel() else torch.zeros(1))
    sums, bits, begin = [torch.zeros(size).double() for size in rows.shape[:dimensions]], hashlib.blake2b(), 0
    for part in rows.split(max(1, AT_ONCE * len(rows) // rows.numel())):
        bits.update(part.contiguous().view(-1).view(torch.uint8).numpy())
        numbers = (part.abs() if part.is_complex() else part).double().nan_to_num(nan=1e30, posinf=1e30, neginf=-1e30)
        chunk = slice(begin, begin := begin + len(part))
        sums[0][chunk] = numbers.reshape(len(part), -1) @ signs(rows[0].numel())
        for dim, total in enumerate(sums[1:], 1):
            sign = signs(rows.numel() // len(total)).view(len(rows), -1)[chunk]
            total += numbers.movedim(dim, 0).reshape(len(total), -1) @ sign.flatten()
    return {"shape": [*whole.shape], "bits": bits.hexdigest(), "sums": sums}


def distance(a: Mapping[str, Record], b: Mapping[str, Record], names: Iterable[str]) -> float:
    """The norm of the difference of all tensors that differ, relative to their norm: a constant buffer may be huge."""
    names = a.keys() & {*names}
    if any(name not in b or a[name]["shape"] != b[name]["shape"] for name in names):
        return math.inf
    pairs = [(a[n]["sums"][0], b[n]["sums"][0]) for n in names if a[n]["bits"] != b[n]["bits"]]
    gap, total = math.hypot(*((x - y).norm() for x, y in pairs)), math.hypot(*(x.norm() for x, _ in pairs))
    return gap and gap / (total or 1e-300)
