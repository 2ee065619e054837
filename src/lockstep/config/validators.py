"""Kinds of values that config keys accept: a test, a description and an example. Free of torch."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.config.formatting import to_text

MAX_INTEGER = 2**63 - 1  # the largest integer that the libraries can hold
MAX_NAME_BYTES = 255  # bytes in a file name
TIME_UNITS = ("weeks", "days", "hours", "minutes", "seconds")  # of timedelta
RUN_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)*")


@dataclass(frozen=True)
class Validator:
    """What a key accepts: a test, its description and an example value."""

    accepts: Callable[[Any], bool]
    takes: str
    example: str

    def or_word(self, word: str | int | None) -> "Validator":
        return Validator(
            lambda v: (type(v) is type(word) and v == word) or self.accepts(v),
            f"{self.takes}, or {to_text(word)}",
            self.example,
        )

    def or_null(self) -> "Validator":
        return self.or_word(None)


def integer(low: int, example: int, noun: str = "a whole number", high: int = MAX_INTEGER) -> Validator:
    text = f"{noun} of at least {low}" + (f" and at most {high}" if high < MAX_INTEGER else "")
    return Validator(lambda v: type(v) is int and low <= v <= high, text, str(example))


def is_number(v: Any) -> bool:
    """Whether `v` is a number that a float can represent: neither infinite nor too large."""
    return (type(v) is int and abs(v) <= MAX_INTEGER) or (type(v) is float and math.isfinite(v))


def number(
    low: float, example: float | str, *, above: bool = False, below: float = math.inf, high: float = math.inf
) -> Validator:
    """A finite number within bounds: `below` is exclusive, `high` inclusive, `low` inclusive unless `above` is set."""

    def accepts(v: Any) -> bool:
        return is_number(v) and (v > low if above else v >= low) and v < below and v <= high

    bounds = [f"{'above' if above else 'of at least'} {low:g}", *([f"below {below:g}"] if below < math.inf else ()),
              *([f"at most {high:g}"] if high < math.inf else ())]  # fmt: skip
    return Validator(accepts, f"a number {' and '.join(bounds)}", str(example))


def numbers(element: Validator, example: str, count: int | None = None, *, rising: bool = False) -> Validator:
    def accepts(v: Any) -> bool:
        is_valid = isinstance(v, list) and count in (None, len(v)) and all(map(element.accepts, v))
        return is_valid and (not rising or v == sorted(set(v)))

    kind = "increasing numbers" if rising else f"{count} numbers" if count else "numbers"
    return Validator(accepts, f"a list of {kind} {element.takes.removeprefix('a number ')}", example)


def one_of(*values: Any, example: Any = None) -> Validator:
    takes = f"one of {', '.join(map(to_text, values))}"
    return Validator(lambda v: any(v == a and type(v) is type(a) for a in values), takes, str(example or values[0]))


def is_batches(v: Any) -> bool:
    return (type(v) is int and 0 <= v <= MAX_INTEGER) or (type(v) is float and 0 <= v <= 1)


def is_devices(v: Any) -> bool:
    if type(v) is int:
        return v == -1 or v > 0
    if isinstance(v, list):
        return len(v) > 0 and all(type(i) is int and i >= 0 for i in v) and len(set(v)) == len(v)
    return bool(v == "auto")


def is_duration(v: Any) -> bool:
    """Whether `v` is a valid `max_time` of Lightning: above 0 and short enough for a timedelta."""
    if isinstance(v, dict):
        return set(v) <= set(TIME_UNITS) and all(is_number(n) and 0 <= n < 1e6 for n in v.values()) and any(v.values())
    return bool(re.fullmatch(r"\d{1,6}:\d\d:\d\d:\d\d", str(v))) and any(char in "123456789" for char in str(v))


def is_text(v: Any) -> bool:
    """Whether `v` is text that can be a path: UTF-8, as the config is saved, with parts short enough for file names."""
    is_utf8 = isinstance(v, str) and v != "" and "\0" not in v and v.encode(errors="replace").decode() == v
    return is_utf8 and all(len(n.encode()) <= MAX_NAME_BYTES for n in v.split("/"))


def is_path(v: Any) -> bool:
    """Of `s3://bucket/runs`, pathlib would make a local folder `s3:`."""
    return is_text(v) and "://" not in v


# --- Kinds of several keys ---

PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", "32", "64", "16", "bf16")

FLAG = one_of(True, False, example="true")
TEXT = Validator(is_text, f"UTF-8 text with at most {MAX_NAME_BYTES} bytes between slashes", "name")
PATH = Validator(
    is_path, f"a path in UTF-8 with at most {MAX_NAME_BYTES} bytes between slashes; URLs are not supported", "data"
)
TRAINED = Validator(
    lambda v: type(v) in (str, int) and is_path(str(v)),
    "the name of a run or the path of a checkpoint; URLs are not supported",
    "first",
).or_null()
STEPS = Validator(is_batches, "a number of steps (an integer) or a fraction of the run (0.0 to 1.0)", "100")
BATCHES = Validator(is_batches, "a number of batches (an integer) or a fraction of them (0.0 to 1.0)", "10").or_null()
SHARE = number(0, 0.5, high=1)
TIMEOUT = number(1, 1800, high=1e8)  # seconds; NCCL counts milliseconds, timedelta at most 1e9 days
CHANNELS = Validator(
    lambda v: v == "model" or (isinstance(v, list) and len(v) in (1, 3) and all(map(is_number, v))),
    "`model`, or one number for each channel",
    "[0.5]",
)
MONITOR = Validator(TEXT.accepts, "the name of a validation metric", "val/loss").or_null()
DEVICES = Validator(is_devices, "a number of devices, auto, -1 for all, or a list of device ids", "2")
NAME = Validator(
    lambda v: type(v) in (str, int) and bool(RUN_NAME.fullmatch(str(v))) and is_text(str(v)),
    f"a name of letters, digits and . _ - +, with at most {MAX_NAME_BYTES} characters between slashes",
    "first",
).or_null()
PRECISION = Validator(lambda v: str(v) in PRECISIONS, f"one of {', '.join(PRECISIONS[:7])}", "bf16-mixed")
DURATION = Validator(
    is_duration, f"days:hours:minutes:seconds above 0, or numbers of {', '.join(TIME_UNITS)}", "00:01:30:00"
).or_null()
INTERVAL = Validator(
    lambda v: is_batches(v) and v > 0, "batches of an epoch or a fraction of them, above 0", "0.5"
).or_null()
POWER_OF_TWO = one_of(*(2**n for n in range(11)), None, example=8)
INPUT = Validator(
    lambda v: isinstance(v, str) and v != "" and "\0" not in v and "://" not in v,
    "a folder, a glob, a CSV, a file, or one of test, val, train; URLs are not supported",
    "photos",
)
