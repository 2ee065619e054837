"""Curves of the report's page: every series and point is there, at its place, and a page stays small."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.extras import render


def polylines(svg: str) -> list[list[tuple[float, float]]]:
    """Of all curves, each from gap to gap."""
    ElementTree.fromstring(svg)  # it is well formed
    assert "nan" not in svg
    return [
        [tuple(map(float, place.split(","))) for place in part.removesuffix("h0").split()]
        for path in re.findall(r' d="M([^"]*)"', svg)
        for part in path.split("M")
    ]


def test_points_lie_where_their_values_say():
    (places,) = polylines(render.chart("Title", "step", {"a": [(0, 1.0), (5, 3.0), (10, 2.0)]}))
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(2 * (y2 - y1), abs=0.2)  # downwards
    assert render.LEFT < x0 < x2 < render.RIGHT
    assert render.TOP < y1 < y0 < render.BOTTOM


def words(svg: str) -> list[str]:
    return [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


def test_names_values_and_round_numbers_of_both_units_are_written():
    curve = {"train/loss": [(0, 0.0), (50, 1.0)]}
    svg = render.chart("Title", "step <1>", curve, x_range=(0.0, 50.0), second_x=("images seen", 64))
    assert {"50", "3,000", "0.4", "step <1>", "images seen"} <= set(words(svg))
    assert 'data-name="train/loss" data-values="0,0 50,1"' in svg  # what the pointer shows
    numbers = re.findall(r'x="([\d.]+)"[^>]*>([\d,]+)<', svg[svg.index('class="in-x"') :])
    place = {text: float(x) for x, text in numbers}
    assert place["3,000"] - place["0"] == pytest.approx(3000 / 64 / 50 * (place["50"] - place["0"]), abs=0.2)
    assert {"20k"} <= set(words(render.chart("Title", "step", {"a": [(0, 0.0), (20_000, 1.0)]})))


def test_a_mark_bars_and_dots_are_drawn():
    marked = [render.chart("Title", "step", {"a": [(0, 1.0), (10, 2.0)]}, mark=("best", x)) for x in (5.0, 50.0)]
    assert ["best" in words(svg) for svg in marked] == [True, False]
    bars = render.chart("Title", "x", {}, bars=[(0.0, 1.0, 3.0), (1.0, 2.0, 6.0)])
    low, high = (float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)"', bars))
    assert high == pytest.approx(2 * low, abs=0.2)
    dots = render.chart("Title", "x", {}, scatter=[(0.0, 0.0), (1.0, 1.0), (math.nan, 1.0)], diagonal=True)
    assert dots.count("<circle") == 2


def test_what_is_not_finite_is_a_gap_and_one_value_has_a_range_around_it():
    series = {"a": [(0, 1.0), (1, math.nan), (2, math.inf), (3, 2.0)], "b": [(0, math.nan)], "c": []}
    svg = render.chart("Title", "", series)
    assert [len(part) for part in polylines(svg)] == [1, 1]
    assert svg.count("<path") == 1 and 'data-values="0,1 3,2"' in svg  # one curve, whose values the pointer shows
    assert render.chart("Title", "", {"b": [(0, math.nan)]}) == ""
    for value in (0.0, -2.0, 1e9):
        ((place,),) = polylines(render.chart("Title", "", {"a": [(7, value)]}))
        assert place == ((render.LEFT + render.RIGHT) / 2, (render.TOP + render.BOTTOM) / 2)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 7), (0.99, 0.991), (0, 123_456), (-1e-9, 1e-9)])
def test_ticks_are_a_few_round_numbers_within_the_range(low, high):
    found = render.ticks(low, high)
    assert 3 <= len(found) <= 7
    assert all(low <= tick <= high for tick in found)


@given(st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=60))
def test_a_curve_is_drawn_from_gap_to_gap(values):
    svg = str(render.chart("Title", "", {"a": list(enumerate(values))}))
    wanted = "".join("x" if math.isfinite(value) else " " for value in values).split()
    assert [len(part) for part in (polylines(svg) if svg else [])] == [len(part) for part in wanted]


def test_a_long_curve_is_thinned_out_and_keeps_its_peaks():
    points = [(step, float(step % 7)) for step in range(100_000)]
    points[70_001] = (70_001, 100.0)
    kept = render.thin_out(points)
    assert len(kept) <= render.MANY
    assert (70_001, 100.0) in kept
    assert list(kept) == sorted(kept)
    assert set(kept) <= set(points)
    points[40_000:60_000] = [(step, math.nan) for step in range(40_000, 60_000)]
    kept = render.thin_out(points)
    assert len(kept) <= render.MANY and (70_001, 100.0) in kept
    (before, gap) = (next(x for x, y in kept if math.isnan(y) is missing and x >= 39_000) for missing in (False, True))
    assert before < 40_000 <= gap < 40_200
