"""Curves as SVG. matplotlib takes more than a second to import and 0.2 s to draw three of them, at the end of every run."""

import html
import math
from collections.abc import Iterator, Mapping, Sequence

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 800, 300
LEFT, RIGHT, TOP, BOTTOM = 80, 780, 40, 250  # the frame around the curves
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")
FEW, MANY = 30, 2000  # up to this many points get markers; more than MANY are thinned out


def chart(title: str, xlabel: str, ylabel: str, series: Mapping[str, Points]) -> str:
    """One SVG; an empty string if no series has a finite point."""
    finite: dict[str, Points] = {
        name: [point for point in points if all(map(math.isfinite, point))] for name, points in series.items()
    }
    finite = {name: thinned(points) for name, points in finite.items() if points}
    if not finite:
        return ""
    x_range, y_range = (widened([point[axis] for points in finite.values() for point in points]) for axis in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        right = LEFT + (x - x_range[0]) / (x_range[1] - x_range[0]) * (RIGHT - LEFT)
        return right, BOTTOM - (y - y_range[0]) / (y_range[1] - y_range[0]) * (BOTTOM - TOP)

    parts = [text((LEFT + RIGHT) / 2, 24, title, size=16), text((LEFT + RIGHT) / 2, 290, xlabel)]
    parts.append(f'<g transform="rotate(-90 16 {(TOP + BOTTOM) / 2})">{text(16, (TOP + BOTTOM) / 2, ylabel)}</g>')
    for x in ticks(*x_range):
        at, _ = place(x, y_range[0])
        parts += [line(at, TOP, at, BOTTOM), text(at, BOTTOM + 18, f"{x:,.6g}")]
    for y in ticks(*y_range):
        _, at = place(x_range[0], y)
        parts += [line(LEFT, at, RIGHT, at), text(LEFT - 8, at + 4, f"{y:,.6g}", anchor="end")]
    parts.append(
        f'<rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}" fill="none" stroke="#000"/>'
    )
    for number, (name, points) in enumerate(finite.items()):
        parts += curve(
            [place(*point) for point in points], COLOURS[number % len(COLOURS)], name, TOP + 20 + 20 * number
        )
    inside = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="12">\n{inside}\n</svg>\n'


def curve(places: Points, colour: str, name: str, legend_y: float) -> Iterator[str]:
    """A line through the points, with markers if they are few, and its entry in the legend."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    if len(places) < FEW:
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)
    yield f'<circle cx="{RIGHT - 12}" cy="{legend_y - 4}" r="4" fill="{colour}"/>'
    yield text(RIGHT - 22, legend_y, name, anchor="end")


def text(x: float, y: float, words: str, *, anchor: str = "middle", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{html.escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def widened(values: Sequence[float]) -> tuple[float, float]:
    """From the smallest to the largest value, with a margin; never empty."""
    low, high = min(values), max(values)
    margin = 0.04 * (high - low) or 0.04 * abs(low) or 1.0
    return low - margin, high + margin


def ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers for an axis."""
    power = 10.0 ** math.floor(math.log10((high - low) / 6))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= 6)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def thinned(points: Points) -> Points:
    """At most MANY points: the lowest and the highest of each group of neighbours, so no peak is lost."""
    each = math.ceil(2 * len(points) / MANY)
    if each <= 2:
        return points
    groups = [points[first : first + each] for first in range(0, len(points), each)]
    ends = [{min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])} for group in groups]
    return [point for group in ends for point in sorted(group)]
