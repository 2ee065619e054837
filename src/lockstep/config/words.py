"""How messages show values and names."""

import re
import shlex
import sys
import unicodedata
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf


def plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value


def shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.1f}"
    return f"{value:,}" if type(value) is int else "" if value is None else str(value)


def counted(count: float, noun: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{count:,.0f} {noun}" + ("" if count == 1 else "s")


FRACTION = re.compile(r"^P\(|(?:^|[/_])(?:acc|accuracy|top_?\d+|precision|recall)(?:$|[/_])")


def is_fraction(name: str, *values: float) -> bool:
    """Whether a metric is shown as a percentage: by its name, and if no value is above 1, as of those logged in percent."""
    return bool(FRACTION.search(name)) and all(0 <= value <= 1 for value in values)


def metric(name: str, value: Any) -> str:
    """The value of a metric: 92.50% of an accuracy, 0.2377 of a loss."""
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
    """`text` with control characters spelt out, except line ends and tabs: a terminal would obey its escape sequences."""
    odd = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp")
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in odd else ascii(c)[1:-1] for c in text)


def inline(text: object) -> str:
    """Text of others, such as the name of a file, as part of a line: line ends and tabs are spelt out as well."""
    return readable(str(text)).replace("\n", "\\n").replace("\t", "\\t")


def shell_line(*words: str) -> str | None:
    """A command for a shell, in which no word does more than be one; None if a word has characters that no line can show."""
    line = shlex.join(words)
    return line if inline(line) == line else None


def warn(text: str) -> None:
    """On standard error, for what comes before a run has its log."""
    print(readable(f"WARNING: {text}"), file=sys.stderr)


def size(n_bytes: float | None) -> str:
    if n_bytes is None:
        return "an unknown amount"
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"
