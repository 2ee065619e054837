"""The arithmetic of benchmarks/benchmark.py: from what the contenders answered to ratios, a table and a verdict. No torch."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

UPPER_BOUNDS = {"lockstep": "upper bound", "lockstep equal precision": "upper bound equal precision"}
PLAIN, FP32 = "plain", "32-true"
TOLERANCE = 0.01  # of accuracies: one percentage point


@dataclass(frozen=True)
class Turn:
    """What a contender did in one round."""

    images: int
    seconds: float
    waited_s: float | None = None  # for data

    @property
    def images_per_s(self) -> float:
        return self.images / self.seconds


@dataclass
class Figures:
    """All of one contender. `about` is what it said last: its precision and peaks; of an upper bound, FLOP and FLOP/s."""

    turns: list[Turn] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    accuracy: float | None = None

    def add(self, answer: Mapping[str, Any]) -> None:
        self.turns.append(Turn(answer["images"], answer["seconds"], answer["waited_s"]))
        self.about = {key: value for key, value in answer.items() if key not in ("images", "seconds", "waited_s")}

    @property
    def precision(self) -> str:
        return str(self.about.get("precision", FP32))


Contenders = Mapping[str, Figures]


def ratio(contenders: Contenders, name: str, other: str | None) -> float | None:
    """The median over rounds of the ratio within the round: what slows a shared machine slows both."""
    if other is None or other not in contenders or name not in contenders:
        return None
    pairs = zip(contenders[name].turns, contenders[other].turns, strict=True)
    return statistics.median(a.images_per_s / b.images_per_s for a, b in pairs)


def waiting(turns: list[Turn]) -> float | None:
    """The share of the time in which there was no data yet."""
    known = [turn.waited_s for turn in turns if turn.waited_s is not None]
    return sum(known) / sum(turn.seconds for turn in turns) if len(known) == len(turns) else None


def flops_share(contenders: Contenders, name: str) -> float | None:
    """FLOP/s over the machine's own in products of large matrices, both in the contender's precision."""
    figures = contenders[name]
    bounds = [contenders[bound] for bound in UPPER_BOUNDS.values() if bound in contenders]
    measured = next((bound.about for bound in bounds if bound.precision == figures.precision), None)
    if measured is None:
        return None
    speed = statistics.median(turn.images_per_s for turn in figures.turns)
    return float(speed * measured["flops_per_image"] / measured["matmul_flops_per_s"])


def shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def memory(about: Mapping[str, Any]) -> str:
    sizes = (about.get("peak_bytes"), about.get("peak_device_bytes"))
    return " + ".join(f"{size / 2**20:,.0f}" for size in sizes if size is not None)


COLUMNS = (
    "contender", "precision", "images/s: median (least to most, n)", "to plain", "to its upper bound", "waiting for data",
    "peak memory, MiB", "share of matmul FLOP/s", "accuracy",
)  # fmt: skip


def row(contenders: Contenders, name: str) -> list[str]:
    figures = contenders[name]
    speeds = [turn.images_per_s for turn in figures.turns]
    digits = ",.0f" if min(speeds) >= 100 else ",.1f"
    least, middle, most = (f"{speed:{digits}}" for speed in (min(speeds), statistics.median(speeds), max(speeds)))
    return [
        name,
        figures.precision,
        f"{middle} ({least} to {most}, {len(speeds)})",
        shown(ratio(contenders, name, PLAIN), ".2f"),
        shown(ratio(contenders, name, UPPER_BOUNDS.get(name)), ".2f"),
        shown(waiting(figures.turns), ".1%"),
        memory(figures.about),
        shown(flops_share(contenders, name), ".1%"),
        shown(figures.accuracy, ".2%"),
    ]


def table(contenders: Contenders) -> str:
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *(row(contenders, name) for name in contenders)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def accuracy_problems(contenders: Contenders) -> Iterator[str]:
    """Contenders that did not learn what the plain loop did: their speed would be of other work."""
    expected = contenders[PLAIN].accuracy if PLAIN in contenders else None
    if expected is None:
        return
    for name, figures in contenders.items():
        if figures.accuracy is not None and abs(figures.accuracy - expected) > TOLERANCE:
            yield f"{name} reached {figures.accuracy:.2%}, the plain loop {expected:.2%}: more than {TOLERANCE:.0%} apart"


def too_slow(contenders: Contenders, limits: Mapping[tuple[str, str], float]) -> Iterator[str]:
    """Ratios below their limits; those of contenders that did not run are left out."""
    for (name, other), limit in limits.items():
        found = ratio(contenders, name, other)
        if found is not None and found < limit:
            yield f"{name} is {found:.2f} times as fast as {other}; at least {limit:.2f} is expected"


def waits_long(contenders: Contenders, most: float) -> Iterator[str]:
    """Contenders of ours that wait for data for more than a share of their time."""
    for name in contenders:
        share = waiting(contenders[name].turns) if name.startswith("lockstep") else None
        if share is not None and share > most:
            yield f"{name} waits for data for {share:.1%} of its time; at most {most:.0%} is expected"
