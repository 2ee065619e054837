"""Templates and charts to pages: one file with its styles, script and images, which needs no network. Free of torch."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from lockstep import __version__
from lockstep.config.words import number, percent, seconds

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

    parts: list[Markup] = []
    for y in ticks(*y_range):
        at = place(x_range[0], y)[1]
        parts += [line(LEFT, at, RIGHT, at, "grid"), text(LEFT - 7, at + 4, compact(y), "end")]
    parts.append(line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis"))
    parts.append(x_axis(x_range, 1.0, xlabel, "in-x" if per_x else ""))
    if per_x:
        parts.append(x_axis(x_range, per_x, per_x_label, "in-per"))
    if diagonal:
        low, high = (pick(x_range[i], y_range[i]) for i, pick in enumerate((max, min)))
        parts.append(line(*place(low, low), *place(high, high), "mark"))
    if mark and x_range[0] <= mark[1] <= x_range[1]:
        at, near_end = place(mark[1], 0)[0], mark[1] > sum(x_range) / 2
        ahead = (-0.3 if near_end else 0.3) * (x_range[1] - x_range[0])
        under = [y for points in lines.values() for x, y in points if 0 <= (x - mark[1]) / ahead <= 1] or [y_range[1]]
        high = BOTTOM - 7 if sum(under) / len(under) > sum(y_range) / 2 else TOP + 8  # where the curves are not
        parts.append(line(at, TOP, at, BOTTOM, "mark"))
        parts.append(text(at + (-5 if near_end else 5), high, mark[0], "end" if near_end else "start", "marked"))
    for low, high, height in bars:
        (left, top), (right, bottom) = place(low, height), place(high, 0)
        shape = Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" class="bar"/>')
        parts.append(shape.format(left + 0.5, top, max(0.5, right - left - 1), bottom - top))
    for point in scatter:
        parts.append(Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2" class="dot"/>').format(*place(*point)))
    for name, colour in coloured(lines):
        parts += curve([place(*point) for point in lines[name]], lines[name], colour, name)
    unit = Markup(' data-per="{}"').format(per_x) if per_x else ""
    head = Markup('<svg viewBox="0 0 {} {}" role="img"{} data-x="{}" data-per-x="{}">')
    return head.format(WIDTH, HEIGHT, unit, xlabel, per_x_label) + Markup("\n").join(parts) + Markup("</svg>")


def coloured(names: Collection[str]) -> list[tuple[str, str]]:
    """Each series with its colour: training is quiet beside others, and so is what would be perfect."""
    quiet = [name for name in names if len(names) > 1 and (name.startswith("train") or name == "perfect")]
    loud = [name for name in names if name not in quiet]
    return [(name, "quiet" if name in quiet else f"c{loud.index(name) % COLOURS}") for name in names]


def x_axis(x_range: tuple[float, float], per_x: float, label: str, name: str) -> Markup:
    low, high = x_range[0] * per_x, x_range[1] * per_x
    places = [(LEFT + (x - low) / (high - low) * (RIGHT - LEFT), compact(x)) for x in ticks(low, high)]
    words = [text(at, BOTTOM + 17, number) for at, number in places]
    words.append(text((LEFT + RIGHT) / 2, HEIGHT - 6, label))
    return Markup('<g class="{}">').format(name) + Markup("").join(words) + Markup("</g>")


def curve(places: Points, values: Points, colour: str, name: str) -> Iterator[Markup]:
    """A line through the points, which says its values to the page's script; with markers if they are few."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    exact = " ".join(f"{x:.6g},{y:.5g}" for x, y in values)
    head = '<polyline points="{}" class="line {}" data-name="{}" data-values="{}"/>'
    yield Markup(head).format(path, colour, name, exact)
    if len(places) < FEW:
        for x, y in places:
            yield Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2.5" class="{}"/>').format(x, y, colour)


def text(x: float, y: float, words: str, anchor: str = "middle", name: str = "") -> Markup:
    head = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}"{}>{}</text>')
    return head.format(x, y, anchor, Markup(' class="{}"').format(name) if name else "", escape(words))


def line(x1: float, y1: float, x2: float, y2: float, name: str) -> Markup:
    shape = '<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>'
    return Markup(shape).format(x1, y1, x2, y2, name)


def compact(value: float) -> str:
    """A short label of an axis: 12k, 0.05."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
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


def interval(ends: tuple[float, float]) -> str:
    return f"{100 * ends[0]:.1f}–{100 * ends[1]:.1f}"


FILTERS = (percent, interval, seconds, number)


def render(template: str, title: str, values: Mapping[str, Any], filters: Sequence[Callable[..., Any]] = ()) -> str:
    loader = FileSystemLoader(FOLDER)
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {function.__name__: function for function in (*FILTERS, *filters)}
    made.tests["share"] = lambda value: hasattr(value, "interval")
    made.tests["setting"] = lambda value: hasattr(value, "text") and hasattr(value, "value")
    made.tests["integer"] = lambda value: isinstance(value, Integral) and not isinstance(value, bool)
    css, js = (Markup((FOLDER / name).read_text()) for name in ("page.css", "page.js"))
    own = {"title": title, "version": __version__, "written": time.strftime("%Y-%m-%d %H:%M %Z")}
    return made.get_template(template).render(**values, **own, css=css, js=js)
