"""Parses targets from CSV cells or folder names into numbers. Free of torch."""

# N sample · L label

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import UserError

KINDS = ("class", "labels", "number")
SEPARATORS = re.compile(r"[|;]")


def labels_of(text: str) -> list[str]:
    """Splits a cell with several labels: `red|round` or `red;round`."""
    return [label for part in SEPARATORS.split(text) if (label := part.strip())]


def names_of(texts: Sequence[str], kind: str, where: str) -> list[str]:
    """The names of classes or labels, in the order of their numbers; empty for numbers. Raises UserError if there is only one."""
    if kind == "number":
        return []
    different = set(texts)
    names = sorted({label for text in different for label in labels_of(text)} if kind == "labels" else different)
    if len(names) < 2:
        raise UserError(f"{where} has only one {kind}, {', '.join(names)}: there is nothing to learn.")
    return names


def targets_of(texts: Sequence[str], kind: str, names: Sequence[str], where: str) -> NDArray[Any]:
    """Class numbers; for `labels`, 0 or 1 per label; for `number`, one number."""
    place = {name: number for number, name in enumerate(names)}
    if kind == "class":
        return np.array([place[text] for text in texts], np.int64)
    if kind == "labels":
        target_NL = np.zeros((len(texts), len(place)), np.float32)
        for row, text in zip(target_NL, texts, strict=True):
            row[[place[label] for label in labels_of(text)]] = 1
        return target_NL
    return np.array([[number(text, f"{where}, line {line}")] for line, text in enumerate(texts, 2)], np.float32)


def number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        raise UserError(f"{where}: target={text} is not a number. Type data.target=class, or repair the line.")
    return value
