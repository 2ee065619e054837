"""How panels of the test set and samples are drawn: the filters that their templates use."""

import math
from typing import Any

from markupsafe import Markup
from PIL import Image

from lockstep.config.words import number, percent
from lockstep.reporting.chart import chart, coloured
from lockstep.reporting.pictures import data_uri, overlaid, thumbnail
from lockstep.tasks.panel import Bars, Lines, Mask, Points, Sample, Tokens


def drawn(panel: Lines | Points | Bars) -> Markup:
    if isinstance(panel, Lines):
        return chart(panel.x, panel.series)
    if isinstance(panel, Points):
        return chart(panel.x, {}, scatter=panel.points, diagonal=panel.diagonal)
    return chart(panel.x, {}, bars=list(zip(panel.edges, panel.edges[1:], panel.counts, strict=False)))


def keys(panel: Lines) -> list[tuple[str, str]]:
    return coloured([name for name, points in panel.series.items() if points])


# --- galleries ---


def shown_images(sample: Sample) -> dict[str, Image.Image]:
    """By name: the masks of a sample over its image, or the image itself."""
    if sample.image_CHW is None:
        return {}
    masks = {name: value for name, value in sample.facts.items() if isinstance(value, Mask)}
    images = {name: overlaid(sample.image_CHW, mask.classes_HW, mask.ignored) for name, mask in masks.items()}
    return images or {"sample": thumbnail(sample.image_CHW)}


def images_of(sample: Sample) -> list[tuple[str, str, bool]]:
    """Name, data URI and whether the pixels are few."""
    return [(name, data_uri(image), max(image.size) <= 64) for name, image in shown_images(sample).items()]


def tokens_of(sample: Sample) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """Name, and each piece with the strength of its colour and its number."""
    found = [(name, value.pieces) for name, value in sample.facts.items() if isinstance(value, Tokens)]
    most = max((abs(v) for _, pieces in found for _, v in pieces if math.isfinite(v)), default=1.0) or 1.0
    return [
        (name, [(text, min(1.0, abs(v) / most) if math.isfinite(v) else 1.0, v) for text, v in pieces])
        for name, pieces in found
    ]


def plain_facts(sample: Sample) -> dict[str, str]:
    return {n: said(n, v) for n, v in sample.facts.items() if not isinstance(v, Mask | Tokens)}


def said(name: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(said(name, each) for each in value)
    if isinstance(value, float) and name.startswith("P("):
        return percent(value)
    return number(value)


def first_lines(sample: Sample) -> list[str]:
    """Target and prediction, the first thing to see."""
    facts = plain_facts(sample)
    target, guess = facts.get("target"), facts.get("prediction")
    if target is not None and guess is not None:
        return [f"{target} → {guess}"]
    return [target] if target is not None else []


def other_lines(sample: Sample) -> list[str]:
    facts = {n: v for n, v in plain_facts(sample).items() if n not in ("target", "prediction")}
    loss = facts.pop("loss", None)
    ending = [f"loss {loss}"] if loss is not None else []
    ending += [f"#{sample.index}"] if sample.index is not None else []
    return [*(f"{n} {v}" for n, v in facts.items()), " · ".join(ending)]


def look(sample: Sample) -> str:
    kinds = {type(value) for value in sample.facts.values()}
    return "texts" if Tokens in kinds else "masks" if Mask in kinds and sample.image_CHW is not None else "images"


FILTERS = (drawn, keys, images_of, tokens_of, first_lines, other_lines, look)
