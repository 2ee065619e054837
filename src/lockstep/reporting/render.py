"""Templates and charts to pages: one file with its styles, script and images, which needs no network. Free of torch."""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lockstep import __version__
from lockstep.config.words import number, percent, seconds, size

# --- Charts as SVG, coloured by the page's CSS. matplotlib takes more than a second to import, at the end of every run ---

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 420, 232
LEFT, RIGHT, TOP, BOTTOM = 46, 410, 14, 190  # the frame around the curves
COLOURS = 8  # classes c0 to c7 of the CSS
FEW, MANY = 30, 1000  # up to this many points get markers; more than `many` are thinned out


def chart(
    xlabel: str,
    series: Mapping[str, Points],
    *,
    scatter: Points = (),
    bars: Sequence[tuple[float, float, float]] = (),
    diagonal: bool = False,
    x_range: tuple[float, float] | None = None,
    highest: float = math.inf,
    mark: tuple[str, float] | None = None,
    per_x: float | None = None,
    per_x_label: str = "",
    many: int = MANY,
) -> Markup:
    """One SVG; empty if there is no finite point. `bars` are (from, to, height). `mark` names a place on the x axis. The y axis
    ends at `highest`, the largest value that there can be.

    `per_x`: a second unit of the x axis, so many of it to one of x; the page switches between the two.
    """
    lines = {name: thinned(finite(points), many) for name, points in series.items()}
    lines = {name: points for name, points in lines.items() if points}
    scatter = finite(scatter)
    shown = [p for points in (*lines.values(), scatter) for p in points]
    shown += [corner for low, high, height in bars for corner in ((low, 0.0), (high, height))]
    if not shown:
        return Markup()
    x_range, y_range = x_range or widened([x for x, _ in shown]), widened([y for _, y in shown])
    if bars:
        y_range = (0.0, y_range[1])
    if max(y for _, y in shown) <= highest:
        y_range = (y_range[0], min(y_range[1], highest))

    def place(x: float, y: float) -> tuple[float, float]:
        right = LEFT + (x - x_range[0]) / (x_range[1] - x_range[0]) * (RIGHT - LEFT)
        return right, BOTTOM - (y - y_range[0]) / (y_range[1] - y_range[0]) * (BOTTOM - TOP)

    low, high = (pick(x_range[i], y_range[i]) for i, pick in enumerate((max, min)))
    marks = []
    if mark and x_range[0] <= mark[1] <= x_range[1]:
        near_end = mark[1] > sum(x_range) / 2
        ahead = (-0.3 if near_end else 0.3) * (x_range[1] - x_range[0])
        under = [y for points in lines.values() for x, y in points if 0 <= (x - mark[1]) / ahead <= 1] or [y_range[1]]
        at_y = BOTTOM - 7 if sum(under) / len(under) > sum(y_range) / 2 else TOP + 8  # where the curves are not
        marks.append((mark[0], place(mark[1], 0)[0], at_y, "end" if near_end else "start"))
    curves = []
    for name, css in coloured(lines):
        places = [place(*point) for point in lines[name]]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        exact = " ".join(f"{x:.6g},{y:.5g}" for x, y in lines[name])
        curves.append((name, css, path, exact, places if len(places) < FEW else []))
    values: dict[str, Any] = {
        "frame": {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        "xlabel": xlabel,
        "per_x": per_x,
        "per_x_label": per_x_label,
        "y_ticks": [(compact(y), place(0, y)[1]) for y in ticks(*y_range)],
        "x_axes": [
            (css, label, [(compact(x), place(x / per, 0)[0]) for x in ticks(x_range[0] * per, x_range[1] * per)])
            for css, per, label in (("in-x" if per_x else "", 1.0, xlabel), ("in-per", per_x, per_x_label))
            if per
        ],
        "diagonals": [(place(low, low), place(high, high))] if diagonal else [],
        "marks": marks,
        "bars": [(place(low, height), place(high, 0)) for low, high, height in bars],
        "dots": [place(*point) for point in scatter],
        "curves": curves,
    }
    return Markup(ENVIRONMENT.get_template("chart.svg.j2").render(values))


def coloured(names: Collection[str]) -> list[tuple[str, str]]:
    """Each series with its colour: training is quiet beside others, and so is what would be perfect."""
    quiet = [name for name in names if len(names) > 1 and (name.startswith("train") or name == "perfect")]
    loud = [name for name in names if name not in quiet]
    return [(name, "quiet" if name in quiet else f"c{loud.index(name) % COLOURS}") for name in names]


def compact(value: float) -> str:
    """A short label of an axis: 12k, 0.05."""
    for least, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.4g}{letter}"
    return f"{value:,.5g}" if abs(value) >= 1e-3 or not value else f"{value:.2g}"


def finite(points: Points) -> Points:
    return [point for point in points if all(map(math.isfinite, point))]


def widened(values: Sequence[float]) -> tuple[float, float]:
    """From the smallest to the largest value, with a margin; never empty."""
    low, high = min(values), max(values)
    margin = 0.04 * (high - low) or 0.5 * abs(low) or 1.0
    return low - margin, high + margin


def ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers for an axis."""
    power = 10.0 ** math.floor(math.log10((high - low) / 6))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= 6)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def thinned(points: Points, many: int = MANY) -> Points:
    """At most `many` points: the lowest and the highest of each group of neighbours, so no peak is lost."""
    each = math.ceil(2 * len(points) / many)
    if each <= 2:
        return points
    groups = [points[first : first + each] for first in range(0, len(points), each)]
    ends = [{min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])} for group in groups]
    return [point for group in ends for point in sorted(group)]


# --- Templates to pages: one file with its styles, script and images, which needs no network. Free of torch ---

FOLDER = Path(__file__).parent / "templates"
ENVIRONMENT = Environment(
    loader=FileSystemLoader(FOLDER),
    autoescape=lambda name: not str(name).endswith(".md.j2"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters |= {
    "percent": percent,
    "seconds": seconds,
    "number": number,
    "size": size,
    "interval": lambda ends: f"{100 * ends[0]:.1f}–{100 * ends[1]:.1f}",
}
ENVIRONMENT.tests |= {
    "share": lambda value: hasattr(value, "interval"),
    "setting": lambda value: hasattr(value, "text") and hasattr(value, "value"),
}


def render(template: str, title: str, values: Mapping[str, Any]) -> str:
    css, js = (Markup((FOLDER / name).read_text()) for name in ("page.css", "page.js"))
    page = {"title": title, "version": __version__, "written": time.strftime("%Y-%m-%d %H:%M %Z"), "css": css, "js": js}
    return ENVIRONMENT.get_template(template).render({**values, **page})
