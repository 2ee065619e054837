"""Formatting of values and names in messages."""

import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf


def plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value


def to_text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.1f}"
    return f"{value:,}" if type(value) is int else "" if value is None else str(value)


def pluralize(count: float, noun: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{count:,.0f} {noun}" + ("" if count == 1 else "s")


FRACTION = re.compile(r"^P\(|(?:^|[/_])(?:acc|accuracy|top_?\d+|precision|recall)(?:$|[/_])")


def is_fraction(name: str, *values: float) -> bool:
    """Whether a metric is shown as a percentage: its name is that of a fraction, and no value is logged in percent."""
    return bool(FRACTION.search(name)) and all(0 <= value <= 1 for value in values)


def metric(name: str, value: Any) -> str:
    """The value of a metric, e.g. 92.50% for an accuracy and 0.2377 for a loss."""
    return percent(value) if isinstance(value, float) and is_fraction(name, value) else number(value)


def percent(share: float) -> str:
    return f"{share:.2%}"


def seconds(value: float) -> str:
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def readable(text: str) -> str:
    """`text` with control characters escaped, except newlines and tabs: a terminal would execute escape sequences."""
    control = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp")
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in control else ascii(c)[1:-1] for c in text)


def inline(text: object) -> str:
    """Untrusted text, such as a file name, as part of a line: newlines and tabs are escaped as well."""
    return readable(str(text)).replace("\n", "\\n").replace("\t", "\\t")


def print_error(text: str) -> None:
    print(readable(text), file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Prints a warning, for messages before a run has its log."""
    print_error(f"WARNING: {text}")


def size(n_bytes: float | None) -> str:
    if n_bytes is None:
        return "an unknown amount"
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"


def name_ranks(ranks: Sequence[object], size: int) -> str:
    """`rank 1 of 4`, `ranks 1, 3 of 4`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {size}"
