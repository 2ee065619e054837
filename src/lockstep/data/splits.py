"""The parts of a data set that a run trains, validates and tests on. Does not import torch."""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from lockstep.data.dataset import DataSet, classes_of
from lockstep.data.sampler import PARTS, SPLIT_SEED, ComputedOrder, Indices, Split, permute, val_count
from lockstep.errors import UserError, raise_problems


def length(dataset: DataSet, part: str) -> int:
    """The length of a part; 0 without `val`."""
    samples = dataset.samples(part)
    return 0 if samples is None else len(samples)


def stratified(part: Any, folds: int) -> tuple[Indices, list[int]]:
    """An order of the samples by fold, and the start of each fold. Class counts differ by at most one between folds."""
    class_N = classes_of(part)
    order_N = permute(np.arange(len(part)), len(part), SPLIT_SEED, 0)
    by_class_N = np.arange(len(part)) if class_N is None else np.argsort(class_N[order_N], kind="stable")
    fold_N = np.empty_like(order_N)
    fold_N[by_class_N] = np.arange(len(part)) % folds
    return order_N[np.argsort(fold_N, kind="stable")], [0, *np.bincount(fold_N, minlength=folds).cumsum().tolist()]


def splits(
    dataset: DataSet, *, batch_size: int, val_fraction: float = 0.1, val_gap: int | None = None, folds: int | None = None, fold: int = 0,
    limit_train: int | None = None,
) -> dict[str, Split]:  # fmt: skip
    """The training, validation and test splits, and those of the further evaluation sets.

    With `folds`, the validation split is this `fold` of the training part. With `val_gap`, it is contiguous (the last
    samples if there are no folds), and `val_gap` samples before and after it are left out.

    Raises:
        UserError: a part is empty, or a setting exceeds the size of the training split.
    """
    (total, val_total, test_total), has_val = (length(dataset, part) for part in PARTS), dataset.val is not None
    unit = f"{dataset.unit} ({dataset.source})" if dataset.source else dataset.unit
    in_blocks, order_N = val_gap is not None, None
    if folds and in_blocks:
        bounds = [total * number // folds for number in range(folds + 1)]
    elif folds:
        order_N, bounds = stratified(dataset.train, folds)
    else:
        bounds = [total - val_count(total, val_fraction), total] if in_blocks else [0, val_count(total, val_fraction)]
    begin, end = (0, 0) if has_val else bounds[fold : fold + 2]
    gap_before, gap_after = min(val_gap or 0, begin), min(val_gap or 0, total - end)
    available = total - (end - begin) - gap_before - gap_after
    count = min(available, limit_train or total)

    def problems() -> Iterator[str]:
        if has_val and (folds or in_blocks):
            key = "loader.folds" if folds else "loader.val_gap"
            yield f"{key} has no effect: this data has its own validation part. Remove {key}, or that part."
        if folds and folds > total:
            yield f"loader.folds={folds} is more than the {total} training {unit}. Set a smaller number."
        for part, samples in zip(PARTS, (total, val_total, test_total), strict=True):
            if not samples and (part != "val" or has_val):
                yield f"the {part} part of the data has no {unit}. Add some, or use different data."
        if available < 1:
            yield f"loader.val_fraction={val_fraction} and loader.val_gap={val_gap} leave none of the {total} training {unit} for training. Set smaller numbers."
        if limit_train is not None and limit_train > max(batch_size, available):
            yield f"loader.limit_train={limit_train} is more than the {available} training {unit}. Set a smaller number, or null."
        if batch_size > count:
            yield f"loader.batch_size={batch_size} is more than the {count} training {unit}. Set loader.batch_size={count} or less."

    raise_problems(islice(problems(), 1))  # the first problem may cause the others
    train, val = (
        Split(total, i, n, not in_blocks, order_N) for i, n in ((end + gap_after, count), (begin, end - begin))
    )
    if has_val:
        val = Split(val_total, 0, val_total, shuffled=False)
    test = Split(test_total, 0, test_total, shuffled=False)
    return {"train": train, "val": val, "test": test, **evaluation_splits(dataset)}


def evaluation_splits(dataset: DataSet) -> dict[str, Split]:
    """The splits of the further evaluation sets. Raises UserError if a set is empty or its name is invalid."""
    names = re.compile("(val|test)/(?!(?:raw|loss|count)$)[^/]+")
    sets = {n: length(dataset, n) if names.fullmatch(n) else 0 for n in dataset.evaluation_sets or ()}
    problem = "is not a valid name, or the set is empty. Name it val/<name> or test/<name>, and add samples to it."
    raise_problems(f"evaluation_sets: {name!r} {problem}" for name, count in sets.items() if not count)
    return {name: Split(total=count, first=0, count=count) for name, count in sets.items()}


def order(split: Split, part: Any, unit: str, *, repeats: int = 1, balance: bool = False) -> ComputedOrder:
    """The order of training. Raises UserError: to balance, the classes are unknown, or there is only one."""
    if not balance:
        return ComputedOrder(split.count, repeats=repeats)
    class_N = classes_of(part)
    if class_N is None:
        raise UserError(
            f"loader.balance=true needs the classes of the training {unit} as one array, as in Arrays(target=...). Remove it."
        )
    train_class_N = class_N[split.indices(np.arange(split.count))]
    members = tuple(np.flatnonzero(train_class_N == number) for number in np.unique(train_class_N))
    if len(members) < 2:
        raise UserError(f"loader.balance=true has no effect: all training {unit} have the same class. Remove it.")
    return ComputedOrder(split.count, repeats=repeats, members=members)
