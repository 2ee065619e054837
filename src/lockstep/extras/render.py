"""Renders templates and charts as pages: one file with its styles, script and images, which works offline. Does not import torch."""

import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from html import escape
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lockstep import __version__
from lockstep.config.formatting import inline, is_fraction, metric, number, percent, seconds, size, to_text

# --- Charts as SVG, coloured by the page's CSS. Importing matplotlib would add more than a second to every run ---

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 420, 232
LEFT, RIGHT, TOP, BOTTOM = 46, 410, 14, 190  # the frame around the curves
COLOURS = 8  # CSS classes c0 to c7, in addition to those of NAMED
NAMED = {"train": "train", "val": "val", "test": "test", "perfect": "quiet"}  # by the beginning of a name
FEW, MANY = 16, 1000  # up to FEW points get markers; more than `many` are thinned out


def chart(
    title: str,
    xlabel: str,
    series: Mapping[str, Points],
    *,
    colours: Mapping[str, str] | None = None,
    scatter: Points = (),
    bars: Sequence[tuple[float, float, float]] = (),
    diagonal: bool = False,
    x_range: tuple[float, float] | None = None,
    highest: float = math.inf,
    percent: bool = False,
    mark: tuple[str, float] | None = None,
    second_x: tuple[str, float] | None = None,
    many: int = MANY,
) -> Markup:
    """An SVG; empty if there is no finite point.

    `colours`: the CSS class of each series; default: those of `with_colours`. `bars`: (from, to, height). `mark`: a label and its x. The y
    axis ends at `highest`, the largest possible value. `second_x`: a second unit of the x axis, and its number per x; the page
    switches between the two.
    """
    lines = {
        name: [list(piece) for finite, piece in groupby(thin_out(points, many), is_finite) if finite]
        for name, points in series.items()
    }
    lines = {name: pieces for name, pieces in lines.items() if pieces}  # pieces of a curve, between its gaps
    scatter = [*filter(is_finite, scatter)]
    corners = [*chain.from_iterable(chain(*lines.values(), [scatter]))]
    corners += [corner for low, high, height in bars for corner in ((low, 0.0), (high, height))]
    if not corners:
        return Markup()
    xs, ys = zip(*corners, strict=True)
    left, right = x_range or value_range(xs)
    bottom, top = value_range(ys)
    bottom = 0.0 if bars else bottom
    top = min(top, highest) if max(ys) <= highest else top
    axes = [("in-x", xlabel, 1.0), ("in-per", *second_x)] if second_x else [("", xlabel, 1.0)]
    svg = ENVIRONMENT.get_template("chart.svg.j2").render(
        title=title,
        percent=percent,
        at_x=lambda x: LEFT + (x - left) / (right - left) * (RIGHT - LEFT),
        at_y=lambda y: BOTTOM - (y - bottom) / (top - bottom) * (BOTTOM - TOP),
        xlabel=xlabel,
        second_x=second_x,
        y_ticks=ticks(bottom, top),
        x_axes=[(css, label, per, ticks(left * per, right * per)) for css, label, per in axes],
        diagonal=(max(left, bottom), min(right, top)) if diagonal else None,
        mark=mark if mark and left <= mark[1] <= right else None,
        bars=bars,
        dots=scatter,
        curves=[(name, (colours or dict(with_colours(lines)))[name], pieces) for name, pieces in lines.items()],
    )
    return Markup(svg)


def with_colours(names: Collection[str], one: str = "c0") -> list[tuple[str, str]]:
    """Each series with its colour. A split has the same colour in every chart, and `perfect` a muted one. `one`: for a single series."""
    colour_of = {name: colour for name in names for start, colour in NAMED.items() if name.startswith(start)}
    others = [name for name in names if name not in colour_of]
    colour_of |= {name: one if len(others) == 1 else f"c{index % COLOURS}" for index, name in enumerate(others)}
    return [(name, colour_of[name]) for name in names]


def compact(value: float) -> str:
    """A short label for an axis: 12k, 0.05."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(1e4, unit):
            return f"{value / unit:.4g}{letter}"
    return f"{value:,.5g}" if abs(value) >= 1e-3 or not value else f"{value:.2g}"


def is_finite(point: tuple[float, float]) -> bool:
    return all(abs(value) < 1e300 for value in point)  # differences of larger values overflow


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """From the smallest to the largest value, with a margin; never empty."""
    low, high = min(values), max(values)
    margin = 0.04 * (high - low) or 0.5 * abs(low) or 1.0
    return low - margin, high + margin


def ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers for an axis."""
    power = 10.0 ** math.floor(math.log10((high - low) / 6))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= 6)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def thin_out(points: Points, many: int = MANY) -> Points:
    """At most `many` points: of each group of neighbours the highest, so no peak is lost, and the lowest or a gap."""
    group_size = math.ceil(2 * len(points) / many)
    if group_size <= 2:
        return points
    thinned_points = list[tuple[float, float]]()
    for first in range(0, len(points), group_size):
        group = points[first : first + group_size]
        kept = {end(group, key=lambda point: (is_finite(point), point[1])) for end in (min, max)}
        thinned_points += [point for point in group if point in kept]
    return thinned_points


# --- Templates to pages ---

FOLDER = Path(__file__).parent / "templates"
ENVIRONMENT = Environment(
    loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
ENVIRONMENT.filters |= {function.__name__: function for function in (percent, seconds, number, size, compact)} | {
    "shown": to_text,
    "metric": lambda value, name: metric(name, value),
    "logged": lambda value, name: percent(value) if is_fraction(name, value) else f"{value:,.6g}",
    "interval": lambda ends: f"{100 * ends[0]:.1f}–{100 * ends[1]:.1f}",
}
FRAME = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}
ENVIRONMENT.globals |= {"frame": FRAME, "few": FEW}
ENVIRONMENT.policies["json.dumps_kwargs"] = {}  # keys are not sorted
MARKUP = re.compile(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)")  # Markdown's markup, in addition to HTML's


def markdown(value: Any) -> Any:
    """Escapes a template's expressions in a Markdown page, except `code`, so text from elsewhere is never markup."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return MARKUP.sub(r"\\\g<0>", escape(inline(value), quote=False))


def code(value: object) -> Markup:
    """Inline code in Markdown, between more backticks than it contains."""
    text = inline(value)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return Markup(f"{fence} {text} {fence}" if len(fence) > 1 else f"`{text}`")


MARKDOWN = ENVIRONMENT.overlay(autoescape=False, finalize=markdown)
MARKDOWN.filters["code"] = code
ENVIRONMENT.tests["share"] = lambda value: hasattr(value, "interval")


def render(template: str, title: str, values: Mapping[str, Any]) -> str:
    css, js = (Markup((FOLDER / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    return ENVIRONMENT.get_template(template).render(
        values, title=title, version=__version__, written=time.strftime("%Y-%m-%d %H:%M %Z"), css=css, js=js
    )
