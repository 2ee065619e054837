"""Kinds of values that config keys accept: a test, a description, an example to type. Free of torch."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST = 2**63 - 1  # what the libraries' integers hold
LONGEST = 255  # bytes in a name of a file
TIME_UNITS = ("weeks", "days", "hours", "minutes", "seconds")  # timedelta's
RUN_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)*")


@dataclass(frozen=True)
class Kind:
    """What a key takes: a test, its description, and an example to type."""

    accepts: Callable[[Any], bool]
    takes: str
    example: str

    def or_auto(self) -> "Kind":
        return Kind(lambda v: v == "auto" or self.accepts(v), f"{self.takes}, or auto", self.example)

    def or_null(self) -> "Kind":
        return Kind(lambda v: v is None or self.accepts(v), f"{self.takes}, or null", self.example)


def whole(low: int, example: int, what: str = "a whole number", high: int = MOST) -> Kind:
    text = f"{what} of at least {low}" + (f" and at most {high}" if high < MOST else "")
    return Kind(lambda v: type(v) is int and low <= v <= high, text, str(example))


def counted(example: int) -> Kind:
    """A number of epochs or steps; -1 is no limit. 0 would train nothing."""
    return Kind(
        lambda v: type(v) is int and (v == -1 or 1 <= v <= MOST),
        "a whole number of at least 1, or -1 for no limit",
        str(example),
    )


def is_number(v: Any) -> bool:
    """A number that a float holds: neither infinite nor too large."""
    return (type(v) is int and abs(v) <= MOST) or (type(v) is float and math.isfinite(v))


def number(
    low: float, example: float | str, *, above: bool = False, below: float = math.inf, high: float = math.inf
) -> Kind:
    """A finite number within bounds: `above` excludes `low`, `below` is excluded, `high` is not."""

    def accepts(v: Any) -> bool:
        return is_number(v) and (v > low if above else v >= low) and v < below and v <= high

    bounds = [f"{'above' if above else 'of at least'} {low:g}", *([f"below {below:g}"] if below < math.inf else ()),
              *([f"at most {high:g}"] if high < math.inf else ())]  # fmt: skip
    return Kind(accepts, f"a number {' and '.join(bounds)}", str(example))


def numbers(each: Kind, example: str, count: int | None = None, *, rising: bool = False) -> Kind:
    def accepts(v: Any) -> bool:
        good = isinstance(v, list) and count in (None, len(v)) and all(map(each.accepts, v))
        return good and (not rising or v == sorted(set(v)))

    takes = each.takes.removeprefix("a number ")
    return Kind(
        accepts, f"a list of {'rising ' if rising else ''}{count or ''} numbers {takes}".replace("  ", " "), example
    )


def one_of(*values: Any, example: Any = None) -> Kind:
    shown = ", ".join("null" if v is None else str(v).lower() if isinstance(v, bool) else str(v) for v in values)
    return Kind(
        lambda v: any(v == a and type(v) is type(a) for a in values), f"one of {shown}", str(example or values[0])
    )


def is_batches(v: Any) -> bool:
    return (type(v) is int and 0 <= v <= MOST) or (type(v) is float and 0 <= v <= 1)


def is_devices(v: Any) -> bool:
    if type(v) is int:
        return v == -1 or v > 0
    if isinstance(v, list):
        return len(v) > 0 and all(type(i) is int and i >= 0 for i in v) and len(set(v)) == len(v)
    return v == "auto" or bool(re.fullmatch(r"\d+(,\d+)*,?", str(v)))


def is_channels(v: Any) -> bool:
    return v == "model" or (isinstance(v, list) and len(v) in (1, 3) and all(map(is_number, v)))


def is_duration(v: Any) -> bool:
    """Lightning's `max_time`: above 0, and short enough for a timedelta."""
    if isinstance(v, dict):
        return set(v) <= set(TIME_UNITS) and all(is_number(n) and 0 <= n < 1e6 for n in v.values()) and any(v.values())
    return bool(re.fullmatch(r"\d{1,6}:\d\d:\d\d:\d\d", str(v))) and any(char in "123456789" for char in str(v))


def is_pair(v: Any, *kinds: Callable[[Any], bool]) -> bool:
    return isinstance(v, list) and len(v) == 2 and all(kind(each) for kind, each in zip(kinds, v, strict=True))


def is_patterns(v: Any) -> bool:
    return is_text(v) or (isinstance(v, list) and v != [] and all(map(is_text, v)))


def is_text(v: Any) -> bool:
    """Also a path: each name in it can be one of a file."""
    return isinstance(v, str) and v != "" and "\0" not in v and all(len(n.encode()) <= LONGEST for n in v.split("/"))
